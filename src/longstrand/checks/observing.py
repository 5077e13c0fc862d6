"""What one training step really ran, layer by layer: ops, kernels, and what they were given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from longstrand.memory.protocol import TileGraph
from longstrand.model import Model
from longstrand.model.forms import HEAD, Place
from longstrand.ops.native import Given, Op, name_of, watched

_STAGES = ("forward_tile", "reopen", "warm_up_tile", "tile_graph")
_SHOWN = 4  # of the shapes of an input


@dataclass
class SeenOp:
    """An op that ran in a layer.

    Attributes:
        refusals: why its kernel did not take what it was given, None among them where it did.
        given: its inputs by name, each as often as it differed; tensors without their values.
        kernels: of its kernels, how often each was called, backward included.
    """

    op: Op
    refusals: set[str | None] = field(default_factory=set)
    given: dict[str, list[Tensor | float | int]] = field(default_factory=dict)
    kernels: Counter[str] = field(default_factory=Counter)

    @property
    def refusal(self) -> str | None:
        """The first reason, where there was any."""
        return min((reason for reason in self.refusals if reason is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "op": self.op.name,
            "forms": sorted({"native" if reason is None else "portable" for reason in self.refusals}),
            "kernels_begin": self.op.kernels,
            "kernels": dict(self.kernels),
            "given": {
                name: [describe(each) for each in found[:_SHOWN]] for name, found in self.given.items()
            },
        }


@dataclass
class Observer:
    """Sees a step on this process; whatever runs outside of a layer belongs to the head.

    Attributes:
        ops: by layer and name.
        cuda: how often the profiler saw each CUDA kernel; empty on a CPU.
    """

    model: Model
    ops: dict[Place, dict[str, SeenOp]] = field(default_factory=dict)
    cuda: Counter[str] = field(default_factory=Counter)
    _place: Place = HEAD

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, everything that runs is noted.

        On a GPU torch's profiler lists the CUDA kernels, too: written for it, and not run on one yet.
        """
        with ExitStack() as held:
            for index, layer in enumerate(self.model.layers):
                for stage in _STAGES:
                    held.enter_context(self._entered(index, layer, stage))
            held.enter_context(watched(self))
            held.enter_context(self._profiled())
            yield

    @contextmanager
    def _entered(self, place: Place, layer: Module, stage: str) -> Iterator[None]:
        """Inside, the layer's stage notes where it is; its class stays as it is."""
        object.__setattr__(layer, stage, partial(self._inside, place, getattr(layer, stage)))
        try:
            yield
        finally:
            object.__delattr__(layer, stage)

    def op(self, op: Op, refusal: str | None, inputs: Mapping[str, Given]) -> None:
        seen = self._seen(op)
        seen.refusals.add(refusal)
        for name, value in inputs.items():
            if value is None:
                continue
            given = value.detach().to("meta") if isinstance(value, Tensor) else value
            known = seen.given.setdefault(name, [])
            if describe(given) not in map(describe, known):
                known.append(given)

    def kernel(self, name: str) -> None:
        for seen in self.ops.get(self._place, {}).values():
            if seen.op.kernels and name.startswith(seen.op.kernels):
                seen.kernels[name] += 1

    def _seen(self, op: Op) -> SeenOp:
        return self.ops.setdefault(self._place, {}).setdefault(op.name, SeenOp(op))

    def _inside(self, place: Place, stage: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        before, self._place = self._place, place
        try:
            found = stage(*arguments, **options)
        finally:
            self._place = before
        if isinstance(found, TileGraph):
            found.back = partial(self._inside, place, found.back)
        return found

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        if self.model.norm.weight.device.type != "cuda":
            yield
            return
        with torch.profiler.profile() as profile:
            yield
        for event in profile.events() or ():
            if event.device_type == torch._C._autograd.DeviceType.CUDA:
                self.cuda[event.name] += 1


def describe(given: Tensor | float | int) -> str:
    """A tensor's dtype and shape, or the number itself."""
    if isinstance(given, Tensor):
        return f"{name_of(given.dtype)} {list(given.shape)}"
    return str(given)
