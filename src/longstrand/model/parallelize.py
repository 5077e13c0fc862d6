"""What is done to a model, from outside, before it trains on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from longstrand.config import ParallelSection
from longstrand.errors import UserError
from longstrand.model.ffn import MixtureOfExperts
from longstrand.model.load import Weights, make_room
from longstrand.model.model import Model
from longstrand.model.sharding import Sharding
from longstrand.parallel import Axis, Mesh, Spread, said_once, together


def parallelize(
    model: Model,
    mesh: Mesh,
    *,
    segments: int | None = None,
    receive: int = 4096,
    shard: bool = True,
    weights: Weights | None = None,
) -> Model:
    """Makes a model one rank's part of a mesh; on one process it stays as it is. The order matters.

    With `weights`, a rank holds its part and never more of the rest than one whole layer beside the embedding, or
    embedding and head.

    Args:
        model: the same on all ranks, with what trains marked (`requires_grad`).
        segments: of each pack per context rank; None: the fewest that balance attention.
        receive: most rows, a token with one of its experts each, that a rank receives at once.
        shard: False leaves every rank all weights; gradients are then the caller's to sum.
        weights: for a model that is only outlined: what it is filled from, on the CPU.

    Raises:
        UserError: the sizes do not fit the model, or the weights cannot be used. No rank waits for another here once
            the mesh has its views.
    """
    # 1. Tokens: each rank of `context` computes its segments of every pack, see SharedWalk.
    model.mesh, model.segments = mesh, segments
    if mesh.world.size == 1 and weights is None:
        return model
    sharding = Sharding(model, mesh) if shard and mesh.devices is not None else None
    spread = spread_of(model, mesh.expert, receive)
    filled = partial(_fill, weights)
    filled(model.embed_tokens, "embed_tokens.")
    for index in sorted(range(len(model.layers)), key=str):  # as their names are ordered
        layer = model.layers[index]
        filled(layer, f"layers.{index}.")
        # 2. Experts: each rank of `expert` keeps its own; tokens go to them.
        if spread is not None:
            spread_experts(layer, spread)
        # 3. Weights: every rank keeps its rows; a pass gathers a layer at a time and reduces its gradients once.
        if sharding is not None:
            sharding.layer(layer)
    filled(model.lm_head, "lm_head.")
    filled(model.norm, "norm.")
    if sharding is not None:
        sharding.root()
    return model


def place_model(
    model: Model,
    mesh: Mesh,
    weights: Callable[[], AbstractContextManager[Weights]] | None,
    sizes: ParallelSection,
    tile: int,
    *,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Model:
    """Makes a model one rank's part of a mesh, which is filled meanwhile where it has no numbers yet.

    Args:
        weights: opens what it is filled from; not asked where it has numbers.
        sizes: segments and rounds are those that it says.
        tile: tokens computed at once.
        loading: entered while it is filled, which exchanges nothing.

    Raises:
        UserError: on all ranks: the model cannot be spread like this, or its weights cannot be used.
    """
    put = partial(
        parallelize, model, mesh, segments=sizes.segments_per_rank, receive=sizes.receive_rows(tile)
    )
    if not model.norm.weight.is_meta:
        with said_once(mesh.world, UserError):  # every rank has the same model and sizes
            return put()
    assert weights is not None
    if mesh.devices is not None:
        mesh.view("world", mesh.devices.device_type)  # ranks meet for it, and for nothing in what follows
    with together(mesh.world), loading(), weights() as numbers:
        return put(weights=numbers)


def _fill(weights: Weights | None, module: nn.Module, prefix: str) -> None:
    if weights is not None:
        weights.fill(make_room(module, torch.device("cpu"), prefix))


@dataclass(frozen=True)
class ExpertPart:
    """What a rank's rows of an expert parameter are of the whole one.

    Attributes:
        shape: of the whole parameter; the first dim counts experts.
        first: the expert of the first row here.
    """

    shape: tuple[int, ...]
    first: int


def spread_of(model: Model, axis: Axis, receive: int) -> Spread | None:
    """Where a model's experts will be: shared by all its layers; knows what a round took.

    Args:
        receive: most rows, a token with one of its experts each, that a rank receives at once.

    Returns:
        None where nothing moves: for an axis of one rank, and for a model without experts.

    Raises:
        UserError: the axis does not divide the number of experts, or `receive` is less than a row per rank.
    """
    if axis.size == 1 or not any(_mixtures(model)):
        return None
    return Spread(axis, model.architecture.n_routed_experts, receive)


@torch.no_grad()
def spread_experts(module: nn.Module, spread: Spread) -> None:
    """Leaves each rank its part of the routed experts of a model, or of one of its layers; tokens will go to them.

    A parameter stays the same object, with fewer rows. Its gradient will hold the sums over the ranks of the axis; what
    is left is to add it up over those that hold the same experts (`Mesh.expert_replicas`), and to divide by nothing.
    To be called once, on weights that are whole, before they are sharded and an optimizer knows them.
    """
    for _, mixture in _mixtures(module):
        assert mixture.spread is None, "the experts are spread already"
        mixture.spread = spread
        for parameter in mixture.experts.parameters():
            # A copy: what is left behind is freed.
            parameter.data = parameter.data[spread.first : spread.first + spread.per_rank].clone()


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
