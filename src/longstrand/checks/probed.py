"""What a probe found, as JSON: real sequences, random ones, the difference, and what little the numbers may say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from longstrand.architecture import DSA, Architecture
from longstrand.checks.distance import PoolDistances
from longstrand.checks.skew import ExpertLoads

VERSION = 1


@dataclass(frozen=True)
class Subject:
    """What was probed.

    Attributes:
        model, weights: in words.
        drawn: the weights are no one's training.
        lengths: tokens of each sequence; the random ones have the same.
        cut: tokens that the sequences were cut to; None: they are whole.
        letters: what random tokens were drawn from, in words.
        receive: rows that a rank may receive in a round.
    """

    model: str
    parameters: int
    dtype: str
    weights: str
    drawn: bool
    tile: int
    lengths: list[int]
    cut: int | None
    letters: str
    seed: int
    expert_ranks: int
    receive: int


@dataclass(frozen=True)
class Pass:
    """What was counted on one kind of sequences.

    Attributes:
        loss: mean nats of the targets that have a weight; None where none has.
    """

    loads: ExpertLoads
    distances: PoolDistances
    loss: float | None


@dataclass(frozen=True)
class Probe:
    """Both kinds of sequences."""

    subject: Subject
    shape: Architecture
    real: Pass
    random: Pass

    @property
    def has_experts(self) -> bool:
        return bool(self.real.loads.layers)

    @property
    def has_pools(self) -> bool:
        return bool(self.real.distances.layers)

    @property
    def data_skew(self) -> float | None:
        """As `ExpertLoads.data_skew` defines it, for the expert ranks of the recipe; None without experts."""
        return self.real.loads.data_skew(self.subject.expert_ranks) if self.has_experts else None

    def left_out(self) -> list[str]:
        """Parts of the report that this model has nothing for."""
        found = []
        if not self.has_experts:
            found.append("expert load and data_skew: this model has no routed experts")
        if not self.has_pools:
            found.append("distances of pools: this model has no sparse-attention layer")
        return found

    def warnings(self) -> list[str]:
        """Where the numbers say little about a training run."""
        found, subject, longest = [], self.subject, max(self.subject.lengths)
        if subject.drawn:
            found.append(
                "the weights are drawn: a router that nothing has trained says little about the one that training "
                "leaves; probe a trained checkpoint (model.path, or a run's own recipe)"
            )
        found += self._of_routers()
        if longest < subject.tile:
            found.append(
                f"the longest sequence has {longest:,} tokens, fewer than one tile of {subject.tile:,}: a whole tile "
                "is more even; probe longer sequences or lower memory.tile"
            )
        if self.has_pools and not self.real.distances.over_all().choosing:
            found.append(
                f"no query sees more pools than the {self.shape.index_topk // self.shape.index_kpool} that it takes, "
                "so the distances are no one's choice; probe longer sequences"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """The content of --json and --out."""
        return {
            "version": VERSION,
            "subject": asdict(self.subject),
            "loss_nats": _pair(self.real.loss, self.random.loss),
            "experts": self.experts() if self.has_experts else None,
            "pools": self.pools() if self.has_pools else None,
            "data_skew": self.skew() if self.has_experts else None,
            "left_out": self.left_out(),
            "warnings": self.warnings(),
        }

    def experts(self) -> dict[str, Any]:
        """Busiest over mean by layer and by number of ranks; and the largest of all layers."""
        real, random = self.real.loads, self.random.loads
        layers = [
            {"layer": layer, **_both(found.as_dict(), random.layers[layer].as_dict())}
            for layer, found in sorted(real.layers.items())
        ]
        return {
            "num_experts": real.num_experts,
            "active": real.num_active,
            "ranks": list(real.ranks),
            "tile_tokens": real.longest,
            "tiles": len(next(iter(real.layers.values())).ratios[real.num_experts]),
            "layers": layers,
            "largest": _both(_largest(layers, "real"), _largest(layers, "random")),
        }

    def pools(self) -> dict[str, Any]:
        """Shares by distance, by layer and over all."""
        real, random = self.real.distances, self.random.distances
        layers = [
            {
                "layer": layer,
                "shares_pools_of_layer_below": self.shape.indexer_types[layer] == "shared",
                **_both(found.as_dict(real.edges), random.layers[layer].as_dict(real.edges)),
            }
            for layer, found in sorted(real.layers.items())
        ]
        assert all(self.shape.layer_types[layer["layer"]] == DSA for layer in layers)
        return {
            "kpool": real.kpool,
            "index_topk": real.index_topk,
            "layers": layers,
            "all": _both(real.over_all().as_dict(real.edges), random.over_all().as_dict(real.edges)),
        }

    def skew(self) -> dict[str, Any]:
        """`data_skew` of real and random tokens, and what bounded rounds make of it."""
        real, random, ranks = self.real.loads, self.random.loads, self.subject.expert_ranks
        value, even = real.data_skew(ranks), random.data_skew(ranks)
        rounds = None
        if ranks > 1:
            rounds = {"receive": self.subject.receive, "real": real.rounds(), "random": random.rounds()}
        return {
            "expert_ranks": ranks,
            "data_skew": value,
            "random": even,
            "real_over_random": value / even,
            "at_most_with_any_ranks": real.data_skew(real.num_experts),
            "rounds_per_tile": rounds,
        }

    def _of_routers(self) -> Iterator[str]:
        """What is a fault of the weights rather than of the data."""
        active, layers = self.real.loads.num_active, sorted(self.real.loads.layers.items())
        collapsed = [layer for layer, of in layers if of.collapsed(active)]
        fixed = [layer for layer, of in layers if of.always_chosen(active) and layer not in collapsed]
        if collapsed:
            yield (
                f"the router of {_layers(collapsed)} sends (nearly) all tokens to the same experts: it has collapsed, "
                "and its load is a fault of the weights rather than of the data"
            )
        if fixed:
            yield (
                f"in {_layers(fixed)} one expert is chosen by (nearly) every token: no data can load it more or less; "
                "balance the router in training (train.balance)"
            )


def _layers(which: list[int]) -> str:
    return f"layer{'s' * (len(which) > 1)} {', '.join(map(str, which))}"


def _largest(layers: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Of all layers, by number of ranks and of what."""
    ratios = [layer[name]["busiest_over_mean"] for layer in layers]
    return {n: {key: max(of[n][key] for of in ratios) for key in ratios[0][n]} for n in ratios[0]}


def _both(real: dict[str, Any], random: dict[str, Any]) -> dict[str, Any]:
    return {"real": real, "random": random, "difference": _difference(real, random)}


def _pair(real: float | None, random: float | None) -> dict[str, Any]:
    return {"real": real, "random": random, "difference": _difference(real, random)}


def _difference(real: Any, random: Any) -> Any:
    """Of all numbers in two values of one form, but the edges of buckets; None where one of them is."""
    if isinstance(real, dict):
        return {
            key: value if key in ("start", "end") else _difference(value, random[key])
            for key, value in real.items()
        }
    if isinstance(real, list):
        return [_difference(*both) for both in zip(real, random, strict=True)]
    return None if real is None or random is None else real - random
