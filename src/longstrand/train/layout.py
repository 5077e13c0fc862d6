"""How a recipe lies on its ranks: what one of them holds and receives, counted on a model without values.

The model is built on torch's meta device and cut by the same `parallelize` that a run calls, for one rank of processes
that are only pretended; streams, segments, pools and choices are asked of the code that makes them. Nothing is
computed, no weight is read and nothing is exchanged, so a laptop counts a recipe for 64 GPUs in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longstrand.architecture import DSA, Architecture
from longstrand.config import Recipe
from longstrand.errors import UserError
from longstrand.memory import Levers, levers_of
from longstrand.memory.store import first_trained
from longstrand.memory.tiles import PackLayout, Shard
from longstrand.model import Model
from longstrand.model.dsa_front import DsaFront
from longstrand.model.kda_layer import KdaLayer
from longstrand.model.kda_passage import KdaFront, KdaPassage
from longstrand.model.parallelize import parallelize
from longstrand.ops.precision import wide_dtype
from longstrand.parallel import Deal, deal, local_part, make_mesh
from longstrand.parallel.pretended import pretended_ranks
from longstrand.plan.exchanges import dsa_received, kda_received, moe_received
from longstrand.train.levers import require_fewer_streams
from longstrand.train.optimizer import freeze_all_but, trained_names


@dataclass(frozen=True)
class Term:
    """Bytes that a rank holds.

    Attributes:
        place: "device", "host" or "file".
        why: how they come about.
    """

    num_bytes: int
    place: str
    why: str


@dataclass(frozen=True)
class Layout:
    """One rank's part of a recipe.

    Attributes:
        num_parameters, num_trained: of the whole model.
        own_parameters, own_trained: of this rank.
        experts: routed experts of a layer on this rank while they are gathered; 0 without MoE layers.
        expert_replicas: ranks that hold the same experts, and share their weights.
        deal: of one sequence of the full length, a single document, over the context ranks.
        held: by name.
        received: bytes that come from other ranks, by (what, when), of one layer and sequence.
    """

    rank: int
    world: int
    num_parameters: int
    num_trained: int
    own_parameters: int
    own_trained: int
    experts: int
    expert_replicas: int
    deal: Deal
    held: dict[str, Term]
    received: dict[tuple[str, str], int]

    @property
    def tokens(self) -> list[int]:
        """Of each context rank."""
        return [sum(b - a for a, b in self.deal.owned_by(rank)) for rank in range(len(self.deal.pairs))]

    def total(self, place: str) -> int:
        return sum(term.num_bytes for term in self.held.values() if term.place == place)


def layout_of(recipe: Recipe, shape: Architecture, rank: int = 0) -> Layout:
    """Counts what one rank of a recipe holds; the first one holds the most weights.

    Raises:
        UserError: the recipe cannot be spread like this, a setting does not fit the model, or is not counted.
    """
    sizes = recipe.parallel
    if not 0 <= rank < sizes.world:
        raise UserError(f"rank {rank}: the recipe has ranks 0 to {sizes.world - 1}; choose one of them")
    with pretended_ranks(sizes.world, rank):
        mesh = make_mesh(data=sizes.data, context=sizes.context, expert=sizes.expert)
        with torch.device("meta"):
            model = Model(shape).convert(getattr(torch, recipe.run.dtype))
        names = trained_names(model.groups(), recipe.train)
        freeze_all_but(model, names)
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        receive = sizes.receive_rows(recipe.memory.tile)
        parallelize(model, mesh, segments=sizes.segments_per_rank, receive=receive)
        counted = _Counted(recipe, model)
        own = {name: local_part(parameter).numel() for name, parameter in model.named_parameters()}
        return Layout(
            rank=rank,
            world=sizes.world,
            num_parameters=sum(whole.values()),
            num_trained=sum(whole[name] for name in names),
            own_parameters=sum(own.values()),
            own_trained=sum(own[name] for name in names),
            experts=shape.n_routed_experts // mesh.expert.size if "sparse" in shape.mlp_layer_types else 0,
            expert_replicas=mesh.expert_replicas.size,
            deal=counted.deal,
            held={**counted.of_weights(), **counted.of_tokens()},
            received=counted.received(),
        )


class _Counted:
    """The terms of one rank; each is the expression of the code that spends it."""

    def __init__(self, recipe: Recipe, model: Model) -> None:
        self.recipe, self.model, self.shape = recipe, model, model.architecture
        self.mesh, self.layers = model.mesh, list[Any](model.layers)
        self.levers: Levers = levers_of(recipe.memory, recipe.run.out)
        self.first = first_trained(model.embed_tokens.weight, self.layers)
        require_fewer_streams(self.levers.keep_every, len(self.layers), self.first)
        if not self.levers.recompute:
            raise UserError(
                "memory.recompute = false: it keeps the activations of all layers, which a layout does not count; "
                "set it to true to count this recipe"
            )
        self.itemsize = getattr(torch, recipe.run.dtype).itemsize
        self.wide = wide_dtype(getattr(torch, recipe.run.dtype)).itemsize
        starts = [0, recipe.data.length]
        self.deal = deal(starts, self.mesh.context.size, model.segments)
        shard = Shard(self.mesh.context, self.deal) if self.mesh.context.size > 1 else None
        self.pack = PackLayout(torch.tensor(starts), self.shape.index_kpool, torch.device("cpu"), shard)

    def of_weights(self) -> dict[str, Term]:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        values = sum(local_part(p).numel() for p in trained)
        narrow = sum(local_part(p).numel() for p in trained if p.dtype.itemsize < 4)
        on_host = self.recipe.memory.optimizer == "host"
        place = "host" if on_host else "device"
        largest = self._largest_layer()
        root = [p for name, p in self.model.named_parameters() if not name.startswith("layers.")]
        copies = (values if on_host else narrow) * 4
        why = "what AdamW moves on the host" if on_host else "masters of what is narrower"
        return {
            "weights": Term(_own_bytes(self.model.parameters()), "device", self.recipe.run.dtype),
            "gradients": Term(values * self.wide, "device", "float32 or wider"),
            "moments": Term(2 * values * self.wide, place, "two per trained parameter"),
            "float32 copies": Term(copies, place, why),
            **({"gradients on the host": Term(values * self.wide, "host", "in a step")} if on_host else {}),
            "largest layer, gathered": Term(_gathered_bytes(largest), "device", "one layer at a time"),
            "its gradients": Term(2 * self._gradient_bytes(largest), "device", "twice in a sum"),
            "embedding and head, gathered": Term(_gathered_bytes(root), "device", "during a pass"),
            "their gradients": Term(2 * self._gradient_bytes(root), "device", "twice in a sum"),
        }

    def of_tokens(self) -> dict[str, Term]:
        """Of one sequence of the full length."""
        pack = self.pack
        tokens = pack.num_tokens
        tiles = pack.num_tiles(self.levers.tile)
        borders = [
            _bytes(self.layers[index].keep(self.layers[index].start(pack)))
            for index in range(self.first, len(self.layers))
        ]
        terms = {
            **self._streams(),
            "choices": Term(self._choice_bytes() * tokens, "device", "pools and experts of each token"),
            "carries at tile borders": Term(sum(borders) * tiles, "device", f"{tiles} tiles"),
            "pack": Term(24 * pack.num_pack_tokens, "device", "tokens, targets, weights, log-probabilities"),
        }
        return terms | self._of_passages() | self._of_all_tokens()

    def _of_passages(self) -> dict[str, Term]:
        """What a layer needs for its two passes over its tiles, where ranks share the sequence."""
        if self.pack.shard is None:
            return {}
        shape, tokens = self.shape, self.pack.num_tokens
        hc, inner = shape.hc_mult, shape.linear_num_heads * shape.linear_head_dim
        middle = shape.hidden_size * self.itemsize + (hc + hc * hc + inner) * self.wide
        trained = self.layers[self.first :]
        kept = [KdaPassage.kept_bytes(each, self.pack) for each in trained if isinstance(each, KdaLayer)]
        states = 2 * len(self.pack.segments) * inner * shape.linear_head_dim * self.wide
        terms = {
            "between a layer's two stages": Term(middle * tokens, "device", "gradients of one layer"),
            "KDA's maps and states": Term(
                sum(kept), "device", f"{len(kept)} layers, from forward to backward"
            ),
            "gradients of the states": Term(states * bool(kept), "device", "of one layer"),
        }
        if self.levers.keep_fronts and trained:
            front = max(map(self._front_bytes, trained)) + 2 * hc * shape.hidden_size * self.itemsize
            terms["fronts"] = Term(front * tokens, "device", "of one layer, with its input and the gradient")
        return terms

    def _front_bytes(self, layer: Any) -> int:
        kind: Any = KdaFront if isinstance(layer, KdaLayer) else DsaFront
        return int(kind.bytes_per_token(layer, self.itemsize, self.wide))

    def _streams(self) -> dict[str, Term]:
        """In slots of whole pages where they leave the device, as a spool or the host's block has them."""
        demand = self.model.stream_demand(self.recipe.data.length, self.levers)
        place = {"none": "device", "host": "host", "disk": "file"}[self.levers.offload]

        def num_bytes(row: tuple[int, ...]) -> int:
            if place == "device":
                return demand.rows[row] * demand.num_tokens * prod(row) * self.itemsize
            return demand.rows[row] * demand.num_tiles * demand.slot_bytes(row)

        stream, mean = (self.shape.hc_mult, self.shape.hidden_size), (self.shape.hidden_size,)
        why = f"{demand.rows[stream]} streams of {stream[0]} x {stream[1]}"
        return {
            "layer inputs": Term(num_bytes(stream), place, why),
            "last mean": Term(num_bytes(mean), place, "for the head's way back"),
        }

    def _of_all_tokens(self) -> dict[str, Term]:
        """One DSA layer's, of the whole sequence on every rank."""
        if DSA not in self.shape.layer_types:
            return {}
        latents, keys = self._dsa_values()
        return {
            "latents of a DSA layer": Term(latents * self.itemsize, "device", "of the whole sequence"),
            "its pool keys": Term(keys * self.itemsize, "device", "of the whole sequence"),
            "gradient of the latents": Term(latents * self.wide, "device", "float32 or wider"),
            "gradient of the pool keys": Term(keys * self.wide, "device", "float32 or wider"),
        }

    def received(self) -> dict[tuple[str, str], int]:
        """Bytes from other ranks, of one layer and one sequence; see `plan/exchanges.py`."""
        found: dict[tuple[str, str], int] = {}
        shape, n, e, w = self.shape, self.mesh.context.size, self.itemsize, self.wide
        if n > 1:
            learns = self.recipe.train.indexer != "frozen"
            found |= kda_received(shape, len(self.pack.segments), n, e, w)
            found |= dsa_received(*self._dsa_values(), n, e, w, indexer_learns=learns)
        if self.mesh.expert.size > 1:
            found |= moe_received(shape, self.pack.num_tokens, self.mesh.expert.size, e)
        elsewhere = [(p, p.numel() - local_part(p).numel()) for p in self._largest_layer()]
        weights = sum(values * p.dtype.itemsize for p, values in elsewhere)
        gradients = sum(values * self.wide for p, values in elsewhere if p.requires_grad)
        found["largest layer: weights", "forward"] = weights
        found["largest layer: weights", "backward"] = weights + gradients
        return found

    def _dsa_values(self) -> tuple[int, int]:
        """Latents and pool keys of the whole sequence, in the blocks that ranks gather."""
        return self.pack.num_slots * self.shape.kv_lora_rank, self.pack.num_pools * self.shape.index_head_dim

    def _choice_bytes(self) -> int:
        """Of one token, over all layers; a layer that shares its pools has none of its own."""
        total, below = 0, dict[str, Tensor]()
        for layer in self.layers:
            chosen = layer.new_choices(1, torch.device("meta"), below)
            total += sum(each.nbytes for name, each in chosen.items() if each is not below.get(name))
            below = chosen
        return total

    def _largest_layer(self) -> list[Tensor]:
        """Parameters of the layer that takes the most bytes when gathered."""
        return max((list(layer.parameters()) for layer in self.layers), key=_gathered_bytes)

    def _gradient_bytes(self, parameters: Iterable[Tensor]) -> int:
        return sum(p.numel() * self.wide for p in parameters if p.requires_grad)


def _own_bytes(parameters: Iterable[Tensor]) -> int:
    return sum(local_part(p).numel() * p.dtype.itemsize for p in parameters)


def _gathered_bytes(parameters: Iterable[Tensor]) -> int:
    """Of those that are sharded, whole."""
    return sum(p.numel() * p.dtype.itemsize for p in parameters if isinstance(p, DTensor))


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
