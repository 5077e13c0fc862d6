"""How a recipe lies on its ranks: which parameters and tokens one of them has, what it holds and what it receives.

Parameters are counted on a model without values: built on torch's meta device and cut by the same `parallelize` that a
run calls, for one rank of processes that are only pretended. Bytes are those of the planner. Nothing is computed, no
weight is read and nothing is exchanged, so a laptop counts a recipe for 64 GPUs in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longstrand.architecture import Architecture
from longstrand.config import Recipe
from longstrand.errors import UserError
from longstrand.memory.store import first_trained
from longstrand.model.load import outline_model
from longstrand.model.parallelize import parallelize
from longstrand.parallel import Deal, deal, local_part, make_mesh
from longstrand.parallel.pretended import pretended_ranks
from longstrand.plan.job import Job
from longstrand.plan.links import latents_received, summaries_received, tokens_received
from longstrand.plan.memory import plan_memory
from longstrand.plan.rules import require_fewer_streams
from longstrand.plan.terms import Memory
from longstrand.train.optimizer import freeze_all_but, trained_names
from longstrand.train.planning import job_of


@dataclass(frozen=True)
class Layout:
    """One rank's part of a recipe.

    Attributes:
        num_parameters, num_trained: of the whole model.
        own_parameters, own_trained: of this rank.
        experts: routed experts of a layer on this rank while they are gathered; 0 without MoE layers.
        expert_replicas: ranks that hold the same experts, and share their weights.
        deal: of one sequence of the full length, a single document, over the context ranks.
        memory: of the rank that holds most.
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
    memory: Memory
    received: dict[tuple[str, str], int]

    @property
    def tokens(self) -> list[int]:
        """Of each context rank."""
        return [sum(b - a for a, b in self.deal.owned_by(rank)) for rank in range(len(self.deal.pairs))]


def layout_of(recipe: Recipe, shape: Architecture, rank: int = 0) -> Layout:
    """Counts what one rank of a recipe holds; the first one holds the most weights.

    Raises:
        UserError: the recipe cannot be spread like this, or a setting does not fit the model.
    """
    sizes = recipe.parallel
    if not 0 <= rank < sizes.world:
        raise UserError(f"rank {rank}: the recipe has ranks 0 to {sizes.world - 1}; choose one of them")
    with pretended_ranks(sizes.world, rank):
        mesh = make_mesh(data=sizes.data, context=sizes.context, expert=sizes.expert)
        model = outline_model(shape, getattr(torch, recipe.run.dtype))
        names = trained_names(model.groups(), recipe.train)
        freeze_all_but(model, names)
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        parallelize(
            model, mesh, segments=sizes.segments_per_rank, receive=sizes.receive_rows(recipe.memory.tile)
        )
        layers = list[Any](model.layers)
        first = first_trained(model.embed_tokens.weight, layers)
        require_fewer_streams(recipe.memory.keep_every, len(layers), first)
        own = {name: local_part(parameter).numel() for name, parameter in model.named_parameters()}
        job = job_of(recipe, shape, device_of(recipe))
        return Layout(
            rank=rank,
            world=sizes.world,
            num_parameters=sum(whole.values()),
            num_trained=sum(whole[name] for name in names),
            own_parameters=sum(own.values()),
            own_trained=sum(own[name] for name in names),
            experts=shape.n_routed_experts // mesh.expert.size if "sparse" in shape.mlp_layer_types else 0,
            expert_replicas=mesh.expert_replicas.size,
            deal=deal([0, recipe.data.length], mesh.context.size, model.segments),
            memory=plan_memory(job),
            received={**_received(job), **_gathered(layers, job.wide)},
        )


def device_of(recipe: Recipe) -> torch.device:
    """The ranks' devices, which are not here: GPUs where the recipe or this machine has a memory beside the host's."""
    beside = "host" in (recipe.memory.offload, recipe.memory.optimizer) or torch.cuda.is_available()
    return torch.device("cuda" if beside else "cpu")


def _received(job: Job) -> dict[tuple[str, str], int]:
    """Bytes from other ranks for one layer's tokens; as a plan's links carry them."""
    found: dict[tuple[str, str], int] = {}
    if job.parallel.context > 1:
        found |= summaries_received(job) | latents_received(job)
    if job.parallel.expert > 1:
        found |= tokens_received(job)
    return found


def _gathered(layers: list[Any], wide: int) -> dict[tuple[str, str], int]:
    """Weights of the layer that takes the most bytes when gathered, and gradients of those that learn."""
    largest = max((list(layer.parameters()) for layer in layers), key=_whole_bytes)
    elsewhere = [(p, p.numel() - local_part(p).numel()) for p in largest]
    weights = sum(values * p.dtype.itemsize for p, values in elsewhere)
    gradients = sum(values * wide for p, values in elsewhere if p.requires_grad)
    what = "largest layer: weights"
    return {(what, "forward"): weights, (what, "backward"): weights + gradients}


def _whole_bytes(parameters: list[Tensor]) -> int:
    return sum(p.numel() * p.dtype.itemsize for p in parameters if isinstance(p, DTensor))
