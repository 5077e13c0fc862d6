"""What one training step computes, seen from outside: layer by layer, token by token, gradient by gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longstrand.data import Pack
from longstrand.memory import Levers, SideLosses
from longstrand.memory.tiles import Tile
from longstrand.model import Model
from longstrand.parallel import Mesh, as_stored
from longstrand.train.optimizer import Optimizer

Piece = tuple[int, int, Tensor]
"""Layer, first position among all tokens of the step, values to add there."""


@dataclass
class Seen:
    """What one rank saw of a step.

    Attributes:
        outputs: of each layer, by tile.
        gradients: of each layer's input, likewise.
        logprobs: by pack; layer 0 stands for none.
        parameters: whole gradients by name, before clipping; empty on all ranks but the first.
        values: loss, norm and whatever else is one number.
        counts: tokens per expert by layer, as counted when gradients were about to be computed.
    """

    outputs: list[Piece] = field(default_factory=list)
    gradients: list[Piece] = field(default_factory=list)
    logprobs: list[Piece] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The same of all ranks, put together."""

    outputs: dict[int, Tensor]  # N R D
    gradients: dict[int, Tensor]  # N R D
    logprobs: Tensor  # N
    parameters: dict[str, Tensor]
    values: dict[str, float]
    counts: dict[int, Tensor]


class Watcher:
    """Watches a model's training passes; `Watch` of each of them."""

    def __init__(self, model: Model, packs: Sequence[Pack]) -> None:
        self.seen = Seen()
        self._model, self._at = model, 0
        self._begins: dict[int, int] = {}
        begin = 0
        for pack in packs:
            self._begins[id(pack)] = begin
            begin += len(pack)
        self._own = model.token_logprobs

    def __enter__(self) -> Watcher:
        object.__setattr__(self._model, "token_logprobs", self._token_logprobs)
        return self

    def __exit__(self, *error: object) -> None:
        object.__delattr__(self._model, "token_logprobs")

    def output(self, layer: int, tile: Tile, y: Tensor) -> None:
        self.seen.outputs.append((layer, self._at + tile.at, y.detach().clone()))

    def gradient(self, layer: int, at: int, dx: Tensor) -> None:
        self.seen.gradients.append((layer, self._at + at, dx.detach().clone()))

    def _token_logprobs(self, pack: Pack, *, levers: Levers, side: SideLosses) -> Tensor:
        """Passes without a graph, and what stands in for a pack on a rank that has none, are not watched."""
        if not torch.is_grad_enabled() or id(pack) not in self._begins:
            return self._own(pack, levers=levers, side=side)
        self._at, side.watch = self._begins[id(pack)], self
        logprobs = self._own(pack, levers=levers, side=side)
        self.seen.logprobs.append((0, self._at, logprobs.detach().clone()))
        _add(self.seen.counts, side.expert_counts)
        return logprobs


class WatchedOptimizer(Optimizer):
    """Keeps the whole gradients of the step that it takes."""

    whole: dict[str, Tensor]

    def step(self, learning_rate: float) -> None:
        self.whole = {
            name: whole(gradient, self.parameters[name], self) for name, gradient in self.gradients().items()
        }
        super().step(learning_rate)


def whole(rows: Tensor, parameter: Tensor, optimizer: Optimizer) -> Tensor:
    """All rows of a sharded tensor, from those of each rank; a copy on the first rank, nothing on the others."""
    return gathered(as_stored(rows.detach().clone(), parameter, optimizer.mesh), optimizer.mesh)


def gathered(stored: Tensor, mesh: Mesh) -> Tensor:
    """A tensor as a checkpoint sees it, whole on the first rank; nothing on the others."""
    if isinstance(stored, DTensor):
        log = logging.getLogger(
            "torch.distributed.tensor._redistribute"
        )  # warns of a slow gather, here a rare one
        level = log.level
        log.setLevel(logging.ERROR)
        stored = stored.full_tensor()
        log.setLevel(level)
    return stored if mesh.first else stored.new_empty(0)


def put_together(ranks: Sequence[Seen]) -> Found:
    """Puts together what the ranks saw: each token was seen by one of them, gradients add up."""
    first = ranks[0]
    counts: dict[int, Tensor] = {}
    for seen in ranks:
        _add(counts, seen.counts)
    logprobs = _sum(piece for seen in ranks for piece in seen.logprobs)[0]
    return Found(
        outputs=_sum(piece for seen in ranks for piece in seen.outputs),
        gradients=_sum(piece for seen in ranks for piece in seen.gradients),
        logprobs=logprobs,
        parameters=first.parameters,
        values=first.values,
        counts=counts,
    )


def _add(counts: dict[int, Tensor], more: dict[int, Tensor]) -> None:
    for layer, count in more.items():
        counts[layer] = counts[layer] + count if layer in counts else count


def _sum(pieces: Iterable[Piece]) -> dict[int, Tensor]:
    held = list(pieces)
    length = max((at + len(values) for _, at, values in held), default=0)
    total: dict[int, Tensor] = {}
    for layer, at, values in held:
        if layer not in total:
            total[layer] = values.new_zeros(length, *values.shape[1:])
        total[layer][at : at + len(values)] += values
    return total
