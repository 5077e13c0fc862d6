"""Faults of training on many ranks, each of which can be put into the product: it runs, and is wrong.

Each is a context; processes that are forked inside it have the fault, too. On one process only the last has an effect.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longstrand.data import Pack
from longstrand.memory import SideLosses
from longstrand.memory.protocol import Choices, ScanEnd
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.model import Model
from longstrand.model.ffn import MixtureOfExperts
from longstrand.model.layer import Layer
from longstrand.parallel import dispatch
from longstrand.parallel.affine import AffineScan
from longstrand.parallel.halo import Halo
from longstrand.train.optimizer import Optimizer, norm
from longstrand.train.step import _Passes

Context = AbstractContextManager[Any]


def no_halo(what: str) -> Context:
    """The rows before a segment are not fetched."""
    own = Halo.fetch

    def fetch(self: Halo, tails: Tensor, name: str) -> Tensor:
        before = own(self, tails, name)
        return torch.zeros_like(before) if name == what else before

    return patch.object(Halo, "fetch", fetch)


def states_not_scanned() -> Context:
    """Every segment begins without a state."""
    own = AffineScan.forward
    return patch.object(AffineScan, "forward", lambda self, maps: torch.zeros_like(own(self, maps)))


def state_gradients_not_scanned() -> Context:
    """What later segments send back does not arrive."""
    own = AffineScan.backward
    return patch.object(AffineScan, "backward", lambda self, grads: torch.zeros_like(own(self, grads)))


def row_offset() -> Context:
    """Rows of later segments see what the row after them may see."""
    own = PackLayout.tile

    def tile(self: PackLayout, start: int, stop: int, index: int = 0) -> Tile:
        given = own(self, start, stop, index)
        first = self.shard is None or given.at < self.shard.deal.edges[1]
        visible = given.num_visible
        return given if first else replace(given, num_visible=torch.cat([visible[1:], visible[-1:]]))

    return patch.object(PackLayout, "tile", tile)


def mean_of_means() -> Context:
    """Each rank divides by the weight of its own tokens, and the ranks by their number."""

    def own_weight(model: Model, packs: list[Pack]) -> float:
        mesh, total = model.mesh, 0.0
        for pack in packs[mesh.data.rank :: mesh.data.size]:
            shard = model._shard(pack.starts)
            spans = [(0, len(pack))] if shard is None else shard.deal.owned_by(mesh.context.rank)
            total += sum(float(pack.weight[start:stop].double().sum()) for start, stop in spans)
        return total * mesh.world.size

    return _rewritten(
        _Passes,
        "backward",
        "total_weight = sum(float(pack.weight.double().sum()) for pack in self.packs)",
        "total_weight = own_weight(self.model, self.packs)",
        own_weight=own_weight,
    )


def experts_times_ranks() -> Context:
    """Gradients of experts are multiplied by the ranks that share them."""
    own = dispatch._ExpertsOver.backward

    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *others, gate_up, down = own(ctx, d_out)
        size = ctx.spread.axis.size
        return (*others, *(None if each is None else each * size for each in (gate_up, down)))

    return patch.object(dispatch._ExpertsOver, "backward", staticmethod(backward))


def local_norm() -> Context:
    """The norm is that of a rank's own rows."""

    def norms(self: Optimizer) -> dict[str, float]:
        return {name: norm(gradient) for name, gradient in self.gradients().items()}

    return patch.object(Optimizer, "norms", norms)


def layer_not_reduced(layer: int) -> Context:
    """The gradients of a layer with experts are not summed over ranks: its stage is called past what would do it."""
    own = Layer.reduce_gradients

    def reduce_gradients(self: Layer) -> None:
        if not isinstance(self.mlp, MixtureOfExperts) or self.mlp.layer != layer:
            own(self)

    return patch.object(Layer, "reduce_gradients", reduce_gradients)


def labels_after_sharding() -> Context:
    """Labels are shifted on each rank: the last token of a segment is to predict the rank's next one."""
    own = Model._scan

    def scan(self: Model, pack: Pack, levers: Any, side: SideLosses, end: ScanEnd | None) -> Tensor:
        shard = self._shard(pack.starts)
        if shard is not None and end is not None:
            spans, targets = shard.deal.owned_by(shard.axis.rank), pack.targets.clone()
            for (_, stop), (start, _) in pairwise(spans):
                targets[stop - 1] = pack.tokens[start]
            end._targets = targets  # type: ignore[attr-defined]
        return own(self, pack, levers, side, end)

    return patch.object(Model, "_scan", scan)


def chosen_again() -> Context:
    """Recompute chooses experts anew, from what is rounded otherwise than in the first pass."""

    def recompute(self: MixtureOfExperts, x: Tensor, choices: Choices) -> tuple[Tensor, Tensor]:
        logits = self.gate.logits(x)
        ids = self.gate.choose(logits.detach().to(torch.float8_e4m3fn).to(logits.dtype))
        return self._mix(x, logits, ids), logits

    return patch.object(MixtureOfExperts, "recompute", recompute)


def _rewritten(owner: type, name: str, line: str, wrong: str, **names: Callable[..., Any]) -> Context:
    """A method with one line replaced, which must be there once: a fault that no longer fits does not pass unseen."""
    method = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(line) == 1, f"{owner.__name__}.{name} has no line {line!r}"
    scope = vars(sys.modules[owner.__module__]) | names
    exec(compile(source.replace(line, wrong), f"<{name}>", "exec"), scope)
    return patch.object(owner, name, scope[name])
