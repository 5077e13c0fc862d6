"""The figure of skewed routing: what a rank receives when many tokens want the same experts, and what comes of it.

    longstrand bench skew [--data DIR]

2 and 4 gloo processes hold a part of the experts each, in float64, and 8,192 tokens together. Three choices of experts:
all tokens want the same one; drawn by Zipf's law; and those of a layer of the shipped model that reads human X, the one
with the busiest expert. Output and every gradient are compared with one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longstrand.bench._arguments import command_line
from longstrand.bench._steps import human_pack
from longstrand.bench._trial import human_x, skipped
from longstrand.bench.figures import show
from longstrand.demo.pretrain import SHIPPED
from longstrand.model import load_model
from longstrand.model.ffn import MixtureOfExperts
from longstrand.ops.experts import experts
from longstrand.parallel import Spread, experts_over, make_mesh, run_ranks

RANKS = (2, 4)
TOKENS = 8192  # of all ranks
RECEIVE = 1024  # rows, of 16,384 where each token has two experts
EXACT = 1e-10
NUM_EXPERTS, WIDTH, INNER, LIMIT = 32, 128, 64, 10.0  # of the drawn ones
RESULTS = ("out", "x", "weights", "gate_up", "down")
CHOICES = ("all tokens to one expert", "Zipf", "human X")
ASKED = {
    "rows in the largest receive": f"<= {RECEIVE}",
    "bytes kept per token": "as without rounds",
    "dropped": "0",
    "difference to one process": f"<= {EXACT:g}",
}
COLUMNS = (
    "choice of experts",
    "ranks",
    "busiest expert / mean",
    "rows for the busiest rank",
    "rounds",
    "largest receive, rows",
    "bytes",
    "kept per token, bytes",
    "dropped",
    "difference",
)


@dataclass(frozen=True)
class Work:
    """Tokens of all ranks with their choice, the experts, and the gradient of the output."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    d_out: Tensor

    @property
    def per_expert(self) -> Tensor:
        """Pairs of a token and one of its experts, by expert."""
        return torch.bincount(self.ids.flatten(), minlength=len(self.gate_up))


def measure(data: Path | None) -> list[dict[str, Any]]:
    """A record per choice and number of ranks."""
    works = {"all tokens to one expert": _one_expert(), "Zipf": _zipf()}
    fasta, records, rows = human_x(data), [], []
    if fasta is not None:
        works["human X"] = _human(fasta)
    truths = {name: _whole(work) for name, work in works.items()}
    for num_ranks in RANKS:
        ranks = run_ranks(num_ranks, _spread, works)
        for choice in CHOICES:
            name = f"skewed routing: {choice}, {num_ranks} ranks"
            if choice not in works:
                records.append(skipped(name, ASKED, issue="C"))
                continue
            found = _join([rank[choice] for rank in ranks], works[choice], truths[choice])
            records.append(_record(name, found))
            rows.append(_row(choice, num_ranks, works[choice], found))
    records[0]["detail"]["table"] = {"columns": list(COLUMNS), "rows": rows}
    return records


def _record(name: str, found: dict[str, Any]) -> dict[str, Any]:
    passes = (
        found["largest_receive"] <= RECEIVE
        and found["largest_bytes"] <= found["bound_bytes"]
        and found["kept_bytes_per_token"] == found["expected_bytes_per_token"]
        and found["dropped"] == 0
        and found["difference"] <= EXACT
    )
    measured = {
        "rows in the largest receive": found["largest_receive"],
        "bytes kept per token": found["kept_bytes_per_token"],
        "dropped": found["dropped"],
        "difference to one process": found["difference"],
    }
    return {"name": name, "asked": ASKED, "measured": measured, "pass": passes, "detail": found}


def _row(choice: str, num_ranks: int, work: Work, found: dict[str, Any]) -> list[str]:
    per_expert = work.per_expert
    return [
        choice,
        str(num_ranks),
        f"{float(per_expert.max() / per_expert.double().mean()):.1f}",
        f"{int(per_expert.view(num_ranks, -1).sum(1).max()):,}",
        str(found["rounds"]),
        f"{found['largest_receive']:,} of {RECEIVE:,}",
        f"{found['largest_bytes']:,}",
        f"{found['kept_bytes_per_token']:,}",
        str(found["dropped"]),
        f"{found['difference']:.1e}",
    ]


def _spread(works: dict[str, Work]) -> dict[str, dict[str, Any]]:
    """Of one rank: its part of the results, and what it received, kept and computed, per choice."""
    axis = make_mesh(
        data=torch.distributed.get_world_size(), context=1, expert=torch.distributed.get_world_size()
    )
    return {
        name: _part(work, Spread(axis.expert, len(work.gate_up), RECEIVE)) for name, work in works.items()
    }


def _part(work: Work, spread: Spread) -> dict[str, Any]:
    rank, size = spread.axis.rank, spread.axis.size
    x, ids, weights, d_out = (each.chunk(size)[rank] for each in (work.x, work.ids, work.weights, work.d_out))
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    params = [each.chunk(size)[rank].clone().requires_grad_() for each in (work.gate_up, work.down)]
    kept: list[int] = []
    received: list[int] = []
    computed: list[int] = []
    exchange = spread.axis.exchange

    def watched(*args: Any) -> Tensor:
        received.append((came := exchange(*args)).nbytes)
        return came

    def compute(rows: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        computed.append(len(rows))
        one = torch.ones(len(rows), 1, dtype=rows.dtype)
        return experts(rows, ids[:, None], one, gate_up, down, LIMIT)

    def keep(value: Tensor) -> Tensor:
        kept.append(value.nbytes)
        return value

    with patch.object(spread.axis, "exchange", watched):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            out = experts_over(spread, x, ids, weights, compute, params)
        rounds, num_computed = spread.num_rounds, sum(computed)
        out.backward(d_out)
    results = (out.detach(), x.grad, weights.grad, *(each.grad for each in params))
    return {
        "results": results,
        "largest_receive": spread.largest_received,
        "largest_bytes": max(received),
        "kept_bytes": sum(kept) - sum(each.nbytes for each in params),
        "computed": num_computed,
        "rounds": rounds,
    }


def _join(ranks: list[dict[str, Any]], work: Work, truth: Sequence[Tensor]) -> dict[str, Any]:
    """What is said of all ranks."""
    differences = {}
    for at, name in enumerate(RESULTS):
        ours = torch.cat([rank["results"][at] for rank in ranks])
        differences[name] = float((ours - truth[at]).norm() / truth[at].norm())
    row_bytes = (2 * work.x.shape[1] + 1) * work.x.element_size()  # in backward: x, d_out and a weight
    per_token = (work.x, work.ids, work.weights)
    return {
        "largest_receive": max(rank["largest_receive"] for rank in ranks),
        "largest_bytes": max(rank["largest_bytes"] for rank in ranks),
        "bound_bytes": RECEIVE * row_bytes,
        "kept_bytes_per_token": sum(rank["kept_bytes"] for rank in ranks) / len(work.x),
        "expected_bytes_per_token": sum(each[0].nbytes for each in per_token),
        "dropped": work.ids.numel() - sum(rank["computed"] for rank in ranks),
        "difference": max(differences.values())
        if all(map(math.isfinite, differences.values()))
        else math.nan,
        "differences": differences,
        "rounds": ranks[0]["rounds"],
    }


def _whole(work: Work) -> tuple[Tensor, ...]:
    """Output and gradients in one process."""
    given = [getattr(work, name).clone().requires_grad_() for name in RESULTS[1:]]
    out = experts(given[0], work.ids, given[1], given[2], given[3], LIMIT)
    out.backward(work.d_out)
    return (out.detach(), *(each.grad for each in given))


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _drawn(ids: Tensor) -> Work:
    return Work(
        _noise(TOKENS, WIDTH),
        ids,
        _noise(*ids.shape, seed=1).sigmoid(),
        _noise(NUM_EXPERTS, 2 * INNER, WIDTH, seed=2) / WIDTH**0.5,
        _noise(NUM_EXPERTS, WIDTH, INNER, seed=3) / INNER**0.5,
        _noise(TOKENS, WIDTH, seed=4),
    )


def _one_expert() -> Work:
    return _drawn(torch.full((TOKENS, 1), 5))


def _zipf() -> Work:
    """The k-th expert is drawn with a probability proportional to 1 / k; two different ones per token."""
    chances = 1 / torch.arange(1.0, NUM_EXPERTS + 1)
    generator = torch.Generator().manual_seed(0)
    return _drawn(torch.multinomial(chances.expand(TOKENS, -1), 2, generator=generator))


@torch.no_grad()
def _human(fasta: Path) -> Work:
    """What the layers of the shipped model give their experts on human X; of the layer with the busiest expert."""
    model = load_model(SHIPPED / "checkpoint", torch.float64)
    own = MixtureOfExperts._routed

    def routed(self: MixtureOfExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        parts.setdefault(self.layer, []).append((x, ids, weights))
        return own(self, x, ids, weights)

    parts: dict[int, list[tuple[Tensor, ...]]] = {}
    with patch.object(MixtureOfExperts, "_routed", routed):
        model.hidden(human_pack(str(fasta), TOKENS))
    works = []
    for layer in model.modules():
        if not isinstance(layer, MixtureOfExperts):
            continue
        x, ids, scale = (torch.cat(each) for each in zip(*parts[layer.layer], strict=True))
        own_weights = layer.experts.gate_up_proj.detach(), layer.experts.down_proj.detach()
        works.append(Work(x, ids, scale, *own_weights, _noise(TOKENS, x.shape[1], seed=4)))
    return max(works, key=lambda work: int(work.per_expert.max()))


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench skew`."""
    options_of = command_line("skew", __doc__)
    options_of.add_argument("--data", type=Path, help="folder of the FASTA of human X")
    return show(measure(options_of.parse_args(list(arguments)).data))
