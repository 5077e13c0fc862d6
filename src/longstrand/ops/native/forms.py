"""The two forms of an op, a CPU kernel and plain torch: which one takes given inputs, and who watches what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

Given = Tensor | float | int | None
"""What an op is called with."""

NO_KERNEL = "it has no kernel"


@runtime_checkable
class Watch(Protocol):
    """Is told what runs in this process."""

    def op(self, op: Op, refusal: str | None, inputs: Mapping[str, Given]) -> None:
        """An op begins: in its kernel, or, where that refuses, in plain torch."""

    def kernel(self, name: str) -> None:
        """A kernel is called."""


@dataclass(frozen=True)
class Op:
    """An op and its forms.

    Attributes:
        portable: what its form in plain torch is called.
        kernels: how the names of its kernels begin; empty where it has none.
        refusal: of the inputs, by name: why its kernel does not take them; None where it does.
    """

    name: str
    portable: str
    kernels: str = ""
    refusal: Callable[..., str | None] = lambda **inputs: NO_KERNEL

    def in_kernel(self, **inputs: Given) -> bool:
        """Whether the op, which begins now, runs in its kernel."""
        refusal = self.refusal(**inputs)
        if _watch is not None:
            _watch.op(self, refusal, inputs)
        return refusal is None


_watch: Watch | None = None


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Inside, `watch` is told of every op and kernel of this process."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


def tell_kernel(name: str) -> None:
    """To be called where a kernel is."""
    if _watch is not None:
        _watch.kernel(name)
