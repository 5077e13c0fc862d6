"""One optimizer step over a list of packs: one token mean over all of them, on whichever ranks they are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstrand.config import TrainSection
from longstrand.data import Pack
from longstrand.errors import CheckFailed
from longstrand.memory import Levers
from longstrand.model import Model, SideLosses
from longstrand.parallel import Mesh
from longstrand.train.optimizer import Optimizer
from longstrand.train.schedule import learning_rate

Counts = Mapping[int, Tensor]
"""Tokens given to each expert, [E], by MoE layer."""


@dataclass(frozen=True)
class StepResult:
    """What one step did on all ranks; `None` for the last four where it had no target and nothing moved.

    Args:
        tokens: tokens read.
        targets: targets with a weight above 0.
        lr: learning rate used.
        loss: nats per target, weighted.
        grad_norm: norm of all trained gradients together, before clipping.
        indexer_kl: mean over rows and DSA layers, nats; None, too, where the indexer does not learn.
        expert_load_max_over_mean: of the fullest expert in any layer; None, too, without MoE layers.
    """

    tokens: int
    targets: int
    lr: float
    loss: float | None = None
    grad_norm: float | None = None
    indexer_kl: float | None = None
    expert_load_max_over_mean: float | None = None


@dataclass(frozen=True)
class _Backward:
    """What the passes over all packs of a step add up to, on all ranks; see `StepResult`."""

    loss: float
    indexer_kl: float | None
    counts: Counts

    @property
    def expert_load(self) -> float | None:
        loads = (float(count.max() / count.double().mean()) for count in self.counts.values())
        return max(loads, default=None)


def _nothing(phase: str) -> None:
    """Nobody wants to know of the phases of a step."""


def take_step(
    model: Model,
    packs: Sequence[Pack],
    optimizer: Optimizer,
    settings: TrainSection,
    *,
    step: int,
    levers: Levers = Levers(),
    ended: Callable[[str], None] = _nothing,
) -> StepResult:
    """Moves the weights by one step, by the same amount on every rank.

        loss = sum over packs of (weight * -logprob) / sum over packs of weight

    The sums run over the whole step and all ranks: a token counts the same in any pack and on any rank. Without a
    target in any pack the weights stay as they are.

    Args:
        model: its trained parameters are those of `optimizer`, with no gradients.
        packs: the sequences of the step, all of them on every rank; each computes its own.
        step: counted from 1; decides the learning rate and stands in errors.
        ended: told of each phase that ends: "forward" and "backward" of each pack, "optimizer".

    Raises:
        CheckFailed: a loss or gradient is not finite, on any rank. The optimizer has not moved on any.
        RunFailed: a spool cannot be made, written or read. The optimizer has not moved.
    """
    tokens = sum(len(pack) for pack in packs)
    targets = sum(int((pack.weight > 0).sum()) for pack in packs)
    rate = learning_rate(settings, step)
    if targets == 0:
        return StepResult(tokens, targets, rate)

    # 1. Gradients of one mean over all packs of all ranks, and their common norm.
    done = _Passes(model, packs, settings, step, levers, ended).backward()
    norm = _clip(optimizer, settings.clip, step)

    # 2. The weights move, then the router's bias.
    optimizer.step(rate)
    optimizer.clear_gradients()
    if settings.balance == "bias":
        move_router_bias(model, done.counts, settings.balance_rate)
    ended("optimizer")
    return StepResult(tokens, targets, rate, done.loss, norm, done.indexer_kl, done.expert_load)


@torch.no_grad()
def move_router_bias(model: Model, counts: Counts, rate: float) -> None:
    """Raises the selection bias of experts below the mean load by `rate`, lowers that of those above it.

    Each layer is judged by its own counts of the whole step; an expert with exactly the mean load stays.

    Source: Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), algorithm 1.
    """
    for layer, count in counts.items():
        bias = model.get_buffer(f"layers.{layer}.mlp.gate.e_score_correction_bias")
        bias += rate * (count.sum() - count * len(count)).sign().to(bias.dtype)


@dataclass(frozen=True)
class _Passes:
    """The passes over the packs of one step that this rank takes part in."""

    model: Model
    packs: Sequence[Pack]
    settings: TrainSection
    step: int
    levers: Levers
    ended: Callable[[str], None]

    @property
    def mesh(self) -> Mesh:
        return self.model.mesh

    def backward(self) -> _Backward:
        """Adds up the gradients of this rank's part of the loss, pack by pack.

        The indexer's loss is a mean over DSA layers and the step's rows with a complete pool. The router's auxiliary
        loss takes expert shares of the whole step. Where other packs or ranks have a part in them, they must first be
        counted: one more forward.
        """
        settings, shape = self.settings, self.model.architecture
        total_weight = sum(float(pack.weight.double().sum()) for pack in self.packs)
        num_layers = shape.layer_types.count("indexed_attention")
        rows = max(num_layers * sum(pack.indexer_rows(shape.index_kpool) for pack in self.packs), 1)
        aux = settings.balance == "aux"
        shares = self._count_experts() if aux and (len(self.packs) > 1 or self.mesh.world.size > 1) else None
        loss, kl = 0.0, 0.0
        counts: dict[int, Tensor] = {}
        for number, pack in self._passes():
            side = SideLosses(
                indexer=settings.indexer,
                indexer_scale=settings.indexer_weight / rows,
                aux_scale=settings.balance_rate if aux and pack is not None else 0.0,
            )
            given = Pack.without_target() if pack is None else pack
            logprobs = self.model.token_logprobs(given, side=side, levers=self.levers)
            if pack is not None:
                counts = _added(counts, side.expert_counts)
            side.expert_counts = shares or side.expert_counts
            part = -(logprobs.double() * given.weight.double()).sum() / total_weight
            value = float(part.detach())
            self._require_finite_loss(value, number)
            self.ended("forward")
            part.backward()
            self.ended("backward")
            loss, kl = loss + value, kl + float(side.indexer_kl) / rows
        world = self.mesh.world
        loss, kl = world.total(loss), world.total(kl)
        return _Backward(loss, None if settings.indexer == "frozen" else kl, self._over_ranks(counts))

    def _passes(self) -> Iterator[tuple[int, Pack | None]]:
        """The passes of this rank, as many as of every other: (number of the pack from 1, the pack).

        Data rank d computes packs d, d + D, d + 2D, ... of the step. Where a rank has no more packs but others do, it
        has None: it runs one token without a target, for what all ranks exchange in a pass.
        """
        axis = self.mesh.data
        for first in range(0, len(self.packs), axis.size):
            index = first + axis.rank
            yield index + 1, self.packs[index] if index < len(self.packs) else None

    def _require_finite_loss(self, value: float, number: int) -> None:
        """Every rank learns of the value of every other, and refuses what is not finite before its backward."""
        world, data = self.mesh.world, self.mesh.data
        values = world.gather(torch.tensor([value], dtype=torch.float64), "losses").tolist()
        for rank, found in enumerate(values):
            pack = number - data.rank + rank // self.mesh.context.size
            where = f"the loss of sequence {pack} of {len(self.packs)}"
            _require_finite(found, f"step {self.step}: {where}{_on_rank(rank, self.mesh)}")

    @torch.no_grad()
    def _count_experts(self) -> dict[int, Tensor]:
        counts: dict[int, Tensor] = {}
        for _, pack in self._passes():
            side = SideLosses()
            self.model.token_logprobs(
                Pack.without_target() if pack is None else pack, side=side, levers=self.levers
            )
            if pack is not None:
                counts = _added(counts, side.expert_counts)
        return self._over_ranks(counts)

    def _over_ranks(self, counts: dict[int, Tensor]) -> dict[int, Tensor]:
        """The counts of all ranks together; one without a pack has counted nothing."""
        world, shape = self.mesh.world, self.model.architecture
        if world.size == 1:
            return counts
        layers = [layer for layer, kind in enumerate(shape.mlp_layer_types) if kind == "sparse"]
        nothing = torch.zeros(shape.n_routed_experts, dtype=torch.int64, device=self.model.norm.weight.device)
        return {layer: world.sum(counts.get(layer, nothing).clone(), "expert counts") for layer in layers}


def _on_rank(rank: int, mesh: Mesh) -> str:
    """Words that name a rank in an error; none where there is but one."""
    return f" (rank {rank})" if mesh.world.size > 1 else ""


def _added(counts: Counts, more: Counts) -> dict[int, Tensor]:
    return {layer: count + counts.get(layer, torch.zeros_like(count)) for layer, count in more.items()}


def _clip(optimizer: Optimizer, limit: float | None, step: int) -> float:
    """The norm of all gradients together, over all ranks; scales them in place where it exceeds the limit."""
    norms = optimizer.norms()
    for name, norm in norms.items():
        _require_finite(norm, f"step {step}: the gradient norm of {name}")
    total = math.hypot(*norms.values())
    if limit is not None and total > limit:
        torch._foreach_mul_(list(optimizer.gradients().values()), limit / total)
    return total


def _require_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise CheckFailed(
            f"{what} is {value}; the optimizer has not moved; lower train.lr, raise train.warmup_steps, "
            "or look at the data of this step"
        )
