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
from longstrand.model import Model, SideLosses
from longstrand.train.optimizer import Optimizer
from longstrand.train.schedule import learning_rate


@dataclass(frozen=True)
class StepResult:
    """What one step did.

    Args:
        loss: nats per target, weighted; None where the whole step had no target and nothing moved.
        tokens: tokens read.
        targets: targets with a weight above 0.
        lr: learning rate used.
        grad_norm: norm of all trained gradients before clipping; None where there was no target.
        indexer_kl: mean over rows and DSA layers, nats; None where the indexer does not learn.
        expert_load_max_over_mean: of the fullest expert, over all MoE layers; None without MoE layers.
    """

    loss: float | None
    tokens: int
    targets: int
    lr: float
    grad_norm: float | None
    indexer_kl: float | None
    expert_load_max_over_mean: float | None


def take_step(
    model: Model, packs: Sequence[Pack], optimizer: Optimizer, settings: TrainSection, *, step: int, tile: int
) -> StepResult:
    """Moves the weights by one step.

        loss = sum over packs of (weight * -logprob) / sum over packs of weight

    The sums run over the whole step, so a token counts the same in a short pack and in a long one, and a pack
    without targets adds exactly 0. Gradients are added up pack by pack. The denominators of the indexer's
    loss (rows with a complete pool) and of the router's (tokens) are those of the whole step, too.

    Args:
        model: its trained parameters are those of `optimizer`, with no gradients.
        packs: the sequences of the step.
        step: counted from 1; decides the learning rate and stands in errors.
        tile: tokens computed at once.

    Raises:
        CheckFailed: a loss or gradient is not finite. The optimizer has not moved.
    """
    rate = learning_rate(settings, step)
    tokens = sum(len(pack) for pack in packs)
    targets = sum(int((pack.weight > 0).sum()) for pack in packs)
    total_weight = sum(float(pack.weight.double().sum()) for pack in packs)
    if total_weight == 0:
        return StepResult(None, tokens, targets, rate, None, None, None)

    # 1. Gradients of one global mean, pack by pack.
    scales = _side_scales(model, packs, settings)
    loss, sides = 0.0, []
    for number, pack in enumerate(packs, start=1):
        side = SideLosses(indexer=settings.indexer, **scales)
        logprobs = model.token_logprobs(pack, tile=tile, side=side)
        part = -(logprobs.double() * pack.weight.double()).sum() / total_weight
        _require_finite(float(part), f"step {step}: the loss of sequence {number} of {len(packs)}")
        part.backward()
        loss += float(part)
        sides.append(side)

    # 2. One norm over all of them.
    norm = _clip(optimizer.gradients(), settings.clip, step)

    # 3. The weights move, then the router's bias.
    optimizer.step(rate)
    optimizer.clear_gradients()
    counts = _sum_counts([side.expert_counts for side in sides])
    if settings.balance == "bias":
        move_router_bias(model, counts, settings.balance_rate)

    rows = _indexer_rows(model, packs) * model.architecture.layer_types.count("indexed_attention")
    kl = (
        sum(float(side.indexer_kl) for side in sides) / max(rows, 1) if settings.indexer != "frozen" else None
    )
    load = max((float(c.max() / c.double().mean()) for c in counts.values()), default=None)
    return StepResult(loss, tokens, targets, rate, norm, kl, load)


@torch.no_grad()
def move_router_bias(model: Model, counts: Mapping[int, Tensor], rate: float) -> None:
    """Raises the selection bias of experts below the mean load by `rate`, lowers that of those above it.

    Each layer is judged by its own counts of the whole step; an expert with exactly the mean load stays.

    Args:
        counts: per MoE layer, tokens given to each expert in the step's first pass.
    """
    for layer, count in counts.items():
        bias = model.get_buffer(f"layers.{layer}.mlp.gate.e_score_correction_bias")
        bias += rate * (count.sum() - count * len(count)).sign().to(bias.dtype)


def _side_scales(model: Model, packs: Sequence[Pack], settings: TrainSection) -> dict[str, float]:
    rows, tokens = _indexer_rows(model, packs), sum(len(pack) for pack in packs)
    return {
        "indexer_scale": settings.indexer_weight / max(rows, 1) if settings.indexer != "frozen" else 0.0,
        "aux_scale": settings.balance_rate / tokens if settings.balance == "aux" else 0.0,
    }


def _indexer_rows(model: Model, packs: Sequence[Pack]) -> int:
    return sum(pack.indexer_rows(model.architecture.index_kpool) for pack in packs)


def _sum_counts(parts: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    return {layer: torch.stack([part[layer] for part in parts]).sum(0) for layer in parts[0]}


def _clip(gradients: Mapping[str, Tensor], limit: float | None, step: int) -> float:
    """The norm of all gradients together; scales them in place where it exceeds the limit."""
    norms = {
        name: torch.linalg.vector_norm(gradient, dtype=torch.float64) for name, gradient in gradients.items()
    }
    for name, norm in norms.items():
        _require_finite(float(norm), f"step {step}: the gradient of {name}")
    total = math.sqrt(sum(float(norm) ** 2 for norm in norms.values()))
    if limit is not None and total > limit:
        torch._foreach_mul_(list(gradients.values()), limit / total)
    return total


def _require_finite(value: float, what: str) -> None:
    if not math.isfinite(value):
        raise CheckFailed(
            f"{what} is {value}; the optimizer has not moved and nothing was saved; "
            "lower train.lr, raise train.warmup_steps, or look at the data of this step"
        )
