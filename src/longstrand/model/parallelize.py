"""What is done to a model, from outside, before it trains on many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from longstrand.model.ffn import MixtureOfExperts
from longstrand.model.model import Model
from longstrand.model.sharding import shard_weights
from longstrand.parallel import Axis, Mesh, Spread


def parallelize(
    model: Model, mesh: Mesh, *, segments: int | None = None, receive: int = 4096, shard: bool = True
) -> Model:
    """Makes a model one rank's part of a mesh; on one process it stays as it is. The order matters.

    Args:
        model: the same on all ranks, with what trains marked (`requires_grad`).
        segments: of each pack per context rank; None: the fewest that balance attention.
        receive: most rows, a token with one of its experts each, that a rank receives at once.
        shard: False leaves every rank all weights; gradients are then the caller's to sum.
    """
    # 1. Tokens: each rank of `context` computes its segments of every pack, see SharedWalk.
    model.mesh, model.segments = mesh, segments
    # 2. Experts: each rank of `expert` keeps its own; tokens go to them.
    spread_experts(model, mesh.expert, receive)
    # 3. Weights: every rank keeps its rows; a pass gathers a layer at a time and reduces its gradients once.
    return shard_weights(model, mesh) if shard else model


@dataclass(frozen=True)
class ExpertPart:
    """What a rank's rows of an expert parameter are of the whole one.

    Attributes:
        shape: of the whole parameter; the first dim counts experts.
        first: the expert of the first row here.
    """

    shape: tuple[int, ...]
    first: int


@torch.no_grad()
def spread_experts(model: nn.Module, axis: Axis, receive: int) -> Spread | None:
    """Leaves each rank of an axis its part of the routed experts, of every layer; tokens will go to them.

    A parameter stays the same object, with fewer rows. Its gradient will hold the sums over the ranks of the axis; what
    is left is to add it up over those that hold the same experts (`Mesh.expert_replicas`), and to divide by nothing.
    To be called once, on weights that are whole, before they are sharded and an optimizer knows them.

    Args:
        receive: most rows, a token with one of its experts each, that a rank receives at once.

    Returns:
        Where the experts are, shared by all layers, and what a round took; None where nothing moves: for an axis of
        one rank, which keeps the model as it is, and for a model without experts.

    Raises:
        UserError: the axis does not divide the number of experts, or `receive` is less than a row per rank.
    """
    spread: Spread | None = None
    if axis.size == 1:
        return spread
    for _, mixture in _mixtures(model):
        assert mixture.spread is None, "the experts are spread already"
        spread = spread or Spread(axis, mixture.num_experts, receive)
        mixture.spread = spread
        for parameter in mixture.experts.parameters():
            # A copy: what is left behind is freed.
            parameter.data = parameter.data[spread.first : spread.first + spread.per_rank].clone()
    return spread


def expert_parts(model: nn.Module) -> dict[str, ExpertPart]:
    """Of each routed expert's parameter, by name: which rows of it are here; all of them unless they are spread."""
    return {
        f"{name}.experts.{leaf}": ExpertPart(
            (mixture.num_experts, *parameter.shape[1:]), mixture.spread.first if mixture.spread else 0
        )
        for name, mixture in _mixtures(model)
        for leaf, parameter in mixture.experts.named_parameters()
    }


def expert_parameter_names(model: nn.Module) -> frozenset[str]:
    """The parameters of routed experts: those whose gradients are summed over `Mesh.expert_replicas` alone."""
    return frozenset(expert_parts(model))


def _mixtures(model: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    for name, module in model.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module
