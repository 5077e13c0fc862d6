"""Streams in host memory beside an accelerator: one block of exact-size slots, pinned as a whole.

The framework's pinned allocator rounds to powers of two (2.25 GiB become 4). Here the block has the bytes of its
slots, is registered with the device once, and is given back when the pass ends.

Which slot moves when is decided in `slots.py` and tested on a CPU with copies that are as late or as early as allowed.
`CudaCopies` has not been run: no GPU was at hand.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from longstrand.errors import RunFailed
from longstrand.memory.slots import Transfer


@runtime_checkable
class Copies(Protocol):
    """Copies between a device and slots of host memory."""

    def out(self, value: Tensor, slot: Tensor) -> Transfer:
        """Begins device -> slot; `value` is not written to from here on, and may be dropped at once."""

    def back(self, slot: Tensor) -> Transfer:
        """Begins slot -> fresh device memory."""

    def close(self) -> None:
        """Waits for all copies."""


def host_block(num_bytes: int) -> Tensor:
    """Exactly `num_bytes` of host memory (whole pages), given back with the last tensor that views it."""
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)


class HostSlots:
    """A medium in a block of host memory.

    Args:
        copies: between this block and the device.
    """

    def __init__(self, block: Tensor, copies: Copies) -> None:
        self._block: Tensor | None = block
        self._copies = copies

    def save(self, at: int, value: Tensor, dtype: torch.dtype) -> Transfer:
        return self._copies.out(value, self._slot(at, tuple(value.shape), dtype))

    def load(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Transfer:
        return self._copies.back(self._slot(at, shape, dtype))

    def close(self) -> None:
        if self._block is not None:
            self._copies.close()
            self._block = None

    def _slot(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._block is not None
        return self._block[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape)


class CudaCopies:
    """One side stream per direction, so that both run beside the computation and beside each other."""

    def __init__(self, block: Tensor, device: torch.device) -> None:
        self._device = device
        code = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)
        if int(code) != 0:
            raise RunFailed(
                f'memory.offload = "host": {block.numel():,} bytes of host memory cannot be pinned (CUDA error '
                f'{int(code)}); raise the locked-memory limit (ulimit -l), or set memory.offload = "disk"'
            )
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # Also of a pass that is never walked back.
        self._closed = weakref.finalize(self, _unpin, block, self._down, self._up)

    def out(self, value: Tensor, slot: Tensor) -> Transfer:
        value = value.to(slot.dtype).contiguous()
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            slot.copy_(value, non_blocking=True)
            value.record_stream(self._down)  # its memory is not given out again before the copy is over
            return _Left(self._down.record_event())

    def back(self, slot: Tensor) -> Transfer:
        with torch.cuda.stream(self._up):
            tile = torch.empty(slot.shape, dtype=slot.dtype, device=self._device)
            tile.copy_(slot, non_blocking=True)
            return _Arriving(self._up.record_event(), tile)

    def close(self) -> None:
        self._closed()


def _unpin(block: Tensor, *streams: torch.cuda.Stream) -> None:
    for stream in streams:
        stream.synchronize()
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())


@dataclass(frozen=True)
class _Left:
    """The host waits: a slot is read again, or its stream freed, only once its bytes are there."""

    event: torch.cuda.Event

    def result(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class _Arriving:
    """The device waits, the host goes on."""

    event: torch.cuda.Event
    tile: Tensor

    def result(self) -> Tensor:
        stream = torch.cuda.current_stream(self.tile.device)
        stream.wait_event(self.event)
        self.tile.record_stream(stream)
        return self.tile
