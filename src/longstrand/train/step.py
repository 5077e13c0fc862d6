"""One optimizer step over a list of packs: one token mean over all of them, whatever their number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstrand.config import TrainSection
from longstrand.data import Pack
from longstrand.errors import CheckFailed
from longstrand.memory import Levers
from longstrand.model import Model, SideLosses
from longstrand.train.optimizer import Optimizer
from longstrand.train.schedule import learning_rate

Counts = Mapping[int, Tensor]
"""Tokens given to each expert, [E], by MoE layer."""


@dataclass(frozen=True)
class StepResult:
    """What one step did; `None` for the last four where the step had no target and nothing moved.

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
    """What the passes over all packs of a step add up to."""

    loss: float
    indexer_kl: float
    counts: Counts


def take_step(
    model: Model,
    packs: Sequence[Pack],
    optimizer: Optimizer,
    settings: TrainSection,
    *,
    step: int,
    levers: Levers = Levers(),
) -> StepResult:
    """Moves the weights by one step.

        loss = sum over packs of (weight * -logprob) / sum over packs of weight

    The sums run over the whole step, so a token counts the same in a short pack and in a long one, and a pack
    without targets adds exactly 0. Without a target in any pack the weights stay as they are.

    Args:
        model: its trained parameters are those of `optimizer`, with no gradients.
        packs: the sequences of the step.
        step: counted from 1; decides the learning rate and stands in errors.
        levers: what bounds memory, such as the number of tokens computed at once.

    Raises:
        CheckFailed: a loss or gradient is not finite. The optimizer has not moved.
        RunFailed: a spool cannot be made, written or read. The optimizer has not moved.
    """
    tokens = sum(len(pack) for pack in packs)
    targets = sum(int((pack.weight > 0).sum()) for pack in packs)
    rate = learning_rate(settings, step)
    if targets == 0:
        return StepResult(tokens, targets, rate)

    # 1. Gradients of one mean over all packs, and their common norm.
    done = _backward(model, packs, settings, step, levers)
    norm = _clip(optimizer, settings.clip, step)

    # 2. The weights move, then the router's bias.
    optimizer.step(rate)
    optimizer.clear_gradients()
    if settings.balance == "bias":
        move_router_bias(model, done.counts, settings.balance_rate)

    load = max((float(count.max() / count.double().mean()) for count in done.counts.values()), default=None)
    kl = done.indexer_kl if settings.indexer != "frozen" else None
    return StepResult(tokens, targets, rate, done.loss, norm, kl, load)


@torch.no_grad()
def move_router_bias(model: Model, counts: Counts, rate: float) -> None:
    """Raises the selection bias of experts below the mean load by `rate`, lowers that of those above it.

    Each layer is judged by its own counts of the whole step; an expert with exactly the mean load stays.

    Source: Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), algorithm 1.
    """
    for layer, count in counts.items():
        bias = model.get_buffer(f"layers.{layer}.mlp.gate.e_score_correction_bias")
        bias += rate * (count.sum() - count * len(count)).sign().to(bias.dtype)


def _backward(
    model: Model, packs: Sequence[Pack], settings: TrainSection, step: int, levers: Levers
) -> _Backward:
    """Adds up the gradients pack by pack.

    The indexer's loss is a mean over DSA layers and the step's rows with a complete pool. The router's auxiliary
    loss takes expert shares of the whole step, which several packs must first be counted for: one more forward.
    """
    total_weight = sum(float(pack.weight.double().sum()) for pack in packs)
    num_layers = model.architecture.layer_types.count("indexed_attention")
    rows = max(num_layers * sum(pack.indexer_rows(model.architecture.index_kpool) for pack in packs), 1)
    aux = settings.balance == "aux"
    shares = _count_experts(model, packs, levers) if aux and len(packs) > 1 else None
    loss, kl = 0.0, 0.0
    counts: dict[int, Tensor] = {}
    for number, pack in enumerate(packs, start=1):
        side = SideLosses(
            indexer=settings.indexer,
            indexer_scale=settings.indexer_weight / rows,
            aux_scale=settings.balance_rate if aux else 0.0,
        )
        logprobs = model.token_logprobs(pack, side=side, levers=levers)
        counts = _added(counts, side.expert_counts)
        side.expert_counts = shares or side.expert_counts
        part = -(logprobs.double() * pack.weight.double()).sum() / total_weight
        value = float(part.detach())
        _require_finite(value, f"step {step}: the loss of sequence {number} of {len(packs)}")
        part.backward()
        loss, kl = loss + value, kl + float(side.indexer_kl) / rows
    return _Backward(loss, kl, counts)


@torch.no_grad()
def _count_experts(model: Model, packs: Sequence[Pack], levers: Levers) -> dict[int, Tensor]:
    counts: dict[int, Tensor] = {}
    for pack in packs:
        side = SideLosses()
        model.token_logprobs(pack, side=side, levers=levers)
        counts = _added(counts, side.expert_counts)
    return counts


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
