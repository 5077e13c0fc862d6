"""A training step on the ranks of a mesh, as one process takes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longstrand.config import TrainSection
from longstrand.data import Pack
from longstrand.memory import Levers
from longstrand.model import Model, SideLosses
from longstrand.train.optimizer import Optimizer
from longstrand.train.schedule import learning_rate
from longstrand.train.step import StepResult, move_router_bias, take_step


def take_step_on(
    model: Model,
    packs: Sequence[Pack],
    optimizer: Optimizer,
    settings: TrainSection,
    *,
    step: int,
    levers: Levers,
) -> StepResult:
    """`take_step`, on all ranks of the optimizer's mesh."""
    if optimizer.mesh.world.size == 1:
        return take_step(model, packs, optimizer, settings, step=step, levers=levers)
    loss, kl, counts = _Passes(model, packs, optimizer, settings, levers).backward()
    total = math.hypot(*optimizer.norms().values())
    if settings.clip is not None and total > settings.clip:
        torch._foreach_mul_(list(optimizer.gradients().values()), settings.clip / total)
    optimizer.step(rate := learning_rate(settings, step))
    optimizer.clear_gradients()
    if settings.balance == "bias":
        move_router_bias(model, counts, settings.balance_rate)
    tokens = sum(len(pack) for pack in packs)
    targets = sum(int((pack.weight > 0).sum()) for pack in packs)
    return StepResult(tokens, targets, rate, loss, total, kl if settings.indexer != "frozen" else None)


@dataclass(frozen=True)
class _Passes:
    model: Model
    packs: Sequence[Pack]
    optimizer: Optimizer
    settings: TrainSection
    levers: Levers

    def backward(self) -> tuple[float, float, dict[int, Tensor]]:
        """Loss, the indexer's loss, and tokens per expert, of all ranks."""
        world, settings, shape = self.optimizer.mesh.world, self.settings, self.model.architecture
        total = sum(float(pack.weight.double().sum()) for pack in self.packs)
        selecting = shape.layer_types.count("indexed_attention")
        rows = max(selecting * sum(pack.indexer_rows(shape.index_kpool) for pack in self.packs), 1)
        aux = settings.balance == "aux"
        shares = self._shares() if aux else None
        loss, kl = 0.0, 0.0
        counts = self._no_counts()
        for pack, real in self._own():
            side = SideLosses(
                indexer=settings.indexer,
                indexer_scale=settings.indexer_weight / rows * real,
                aux_scale=settings.balance_rate * (aux and real),
            )
            logprobs = self.model.token_logprobs(pack, side=side, levers=self.levers)
            self._add(counts, side, real)
            if shares is not None:
                side.expert_counts, side.num_active = shares, shape.num_experts_per_tok
            part = -(logprobs.double() * pack.weight.double()).sum() / total * real
            part.backward()
            loss, kl = loss + float(part.detach()), kl + float(side.indexer_kl) / rows * real
        return world.total(loss), world.total(kl), self._over_ranks(counts)

    def _own(self) -> Iterator[tuple[Pack, bool]]:
        """This rank's packs; where others have more, the first one stands in, and counts nothing."""
        axis = self.optimizer.mesh.data
        for first in range(axis.rank, -(-len(self.packs) // axis.size) * axis.size, axis.size):
            real = first < len(self.packs)
            yield self.packs[first] if real else Pack.from_documents([torch.zeros(1).long()]), real

    @torch.no_grad()
    def _shares(self) -> dict[int, Tensor]:
        counts = self._no_counts()
        for pack, real in self._own():
            side = SideLosses()
            self.model.token_logprobs(pack, side=side, levers=self.levers)
            self._add(counts, side, real)
        return self._over_ranks(counts)

    def _no_counts(self) -> dict[int, Tensor]:
        shape = self.model.architecture
        layers = [layer for layer, kind in enumerate(shape.mlp_layer_types) if kind == "sparse"]
        return {layer: torch.zeros(shape.n_routed_experts, dtype=torch.int64) for layer in layers}

    def _add(self, counts: dict[int, Tensor], side: SideLosses, real: bool) -> None:
        for layer, count in side.expert_counts.items():
            counts[layer] += count * real

    def _over_ranks(self, counts: dict[int, Tensor]) -> dict[int, Tensor]:
        return {layer: self.optimizer.mesh.world.sum(count) for layer, count in counts.items()}
