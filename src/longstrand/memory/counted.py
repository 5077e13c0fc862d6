"""Bytes of all living tensors, counted where they are allocated: by torch on a GPU, by our allocator on a CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from longstrand.ops.native.build import CannotBuild, Sources, loaded_library

_HERE = Path(__file__).parent
_TORCH = Path(torch.__file__).parent


class CountedMemory:
    """The living bytes of a device's tensors; `take()` gives their peak.

    What an operation allocates inside itself is counted too; what a library takes past torch's allocator is not, nor,
    on a CPU, what was allocated before the first of these was made.

    On a CPU, blocks of 64 KiB and more lie in pages that go back to the system once they are free and not needed for
    the next ones (pages.h): resident memory follows what lives, without the holes of a heap. The allocator stays for
    the life of the process; an allocation costs about 0.1 us more.

    Attributes:
        why_not: why nothing is counted; None where it is.
        has_pages: whether large blocks lie in pages of their own; not where the system gives no addresses for them.
            None where nothing is counted, and on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._counter: ctypes.CDLL | None = None
        self.why_not: str | None = None
        if self._cuda is None:
            self._counter, self.why_not = _started()
        self.has_pages = None if self._counter is None else bool(self._counter.has_pages())

    def live(self) -> int | None:
        """Bytes that live now; None where nothing is counted."""
        if self._cuda is not None:
            return torch.cuda.memory_allocated(self._cuda)
        return None if self._counter is None else int(self._counter.live_bytes())

    def take(self) -> int | None:
        """The most bytes that lived at once since the last call, or since the start; None where nothing is counted.

        On a CPU all free pages go back to the system.
        """
        if self._cuda is not None:
            peak = torch.cuda.max_memory_allocated(self._cuda)
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return peak
        return None if self._counter is None else int(self._counter.take_most())


def _started() -> tuple[ctypes.CDLL, None] | tuple[None, str]:
    """The counter in its place, or why there is none."""
    try:
        counter = _counter()
    except CannotBuild as error:
        return None, str(error)
    if not counter.start_counting():
        return (
            None,
            "torch allocates by an allocator that no counter can stand before: another library has set it",
        )
    return counter, None


@cache
def _counter() -> ctypes.CDLL:
    """The counter's library; compiled once per machine (about 1 s)."""
    flags = (
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-shared",
        f"-I{_TORCH / 'include'}",
        f"-L{_TORCH / 'lib'}",
        "-lc10",
    )
    version = f"-DTORCH_{torch.__version__.replace('.', '_').replace('+', '_')}"  # a new torch, a new library
    library = loaded_library(
        sources=Sources((_HERE / "counter.cpp",), (_HERE / "pages.h",), (*flags, version))
    )
    for name in ("live_bytes", "take_most"):
        getattr(library, name).restype = ctypes.c_int64
    library.start_counting.restype = library.has_pages.restype = ctypes.c_bool
    return library
