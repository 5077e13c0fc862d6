"""Streams outside the device: slots of one tile each, read ahead and written behind while the walk computes.

What moves the bytes is a medium (`spool.py`: a file; `host.py`: host memory); which slot moves when is decided here,
and is the same for both.

Device memory: one tile read ahead per stream that is read, `WRITES` tiles behind per stream that is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from longstrand.memory.tiles import Tile

PAGE = 4096
"""Slots begin and end on pages, as direct I/O and pinning ask."""

WRITES = 4
"""Tiles of a stream that may be on their way out at once; the next write waits for the oldest."""


@runtime_checkable
class Transfer(Protocol):
    """A copy under way."""

    def result(self) -> Any:
        """Waits for its end; a load gives the tile on the device.

        Raises:
            RunFailed: the copy did not succeed.
        """


@runtime_checkable
class Medium(Protocol):
    """Bytes outside the device, addressed by 64-bit offsets."""

    def save(self, at: int, value: Tensor, dtype: torch.dtype) -> Transfer:
        """Begins to store a tile at byte `at`; `value` is not written to from here on, and may be dropped at once."""

    def load(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Transfer:
        """Begins to fetch a tile into fresh memory."""

    def close(self) -> None:
        """Waits for all copies and frees everything; may be called again."""


@dataclass(frozen=True)
class Demand:
    """What a pass asks of a medium.

    Attributes:
        rows: for each shape of a token's row, how many streams of it live at once.
        segments: tokens of each segment, which no tile spans; None: one segment.
    """

    num_tokens: int
    tile: int
    dtype: torch.dtype
    rows: Mapping[tuple[int, ...], int]
    segments: tuple[int, ...] | None = None

    @property
    def num_tiles(self) -> int:
        return len(self.tile_tokens)

    @cached_property
    def tile_tokens(self) -> tuple[int, ...]:
        """Tokens of each tile."""
        segments = (self.num_tokens,) if self.segments is None else self.segments
        return tuple(min(self.tile, n - start) for n in segments for start in range(0, n, self.tile))

    def slot_bytes(self, row: tuple[int, ...]) -> int:
        """Exact bytes of the largest tile, rounded up to whole pages."""
        tokens = max(self.tile_tokens, default=0)
        return -(-tokens * prod(row) * self.dtype.itemsize // PAGE) * PAGE

    @property
    def num_bytes(self) -> int:
        return sum(n * self.num_tiles * self.slot_bytes(row) for row, n in self.rows.items())


class SlottedStreams:
    """The streams of one pass on a medium that has room for `demand`."""

    def __init__(self, medium: Medium, demand: Demand) -> None:
        self._medium, self._demand = medium, demand
        self._free: dict[tuple[int, ...], list[int]] = {}
        at = 0
        for row, number in demand.rows.items():
            size = demand.num_tiles * demand.slot_bytes(row)
            self._free[row] = [at + size * index for index in range(number)]
            at += size * number

    def new(self, *row: int) -> SlottedStream:
        at = self._free[row].pop()
        return SlottedStream(self._medium, self._demand, row, at, self._free[row])

    def close(self) -> None:
        self._medium.close()


class SlottedStream:
    """One stream; its region goes back to `freed` when it is freed."""

    def __init__(
        self, medium: Medium, demand: Demand, row: tuple[int, ...], at: int, freed: list[int]
    ) -> None:
        self._medium, self._demand, self._row, self._at, self._freed = medium, demand, row, at, freed
        self._slot_bytes = demand.slot_bytes(row)
        self._last: int | None = None
        self._ahead: tuple[int, Transfer] | None = None
        self._behind: dict[int, Transfer] = {}  # oldest first

    def read(self, tile: Tile) -> Tensor:
        """The tile, and the one that comes next in this direction is on its way."""
        slot = tile.index
        ahead, self._ahead = self._ahead, None
        arriving = ahead[1] if ahead is not None and ahead[0] == slot else self._load(slot)
        following = slot + self._direction(slot)
        self._last = slot
        if 0 <= following < self._demand.num_tiles:
            self._ahead = (following, self._load(following))
        return arriving.result()

    def write(self, tile: Tile, value: Tensor) -> None:
        """Begins to store the tile; an error of an earlier one shows here, at the latest when the stream is freed."""
        slot = tile.index
        if self._ahead is not None and self._ahead[0] == slot:
            self._ahead = None
        self._wait_for(slot)
        while len(self._behind) >= WRITES:
            self._wait_for(next(iter(self._behind)))
        self._behind[slot] = self._medium.save(self._offset(slot), value, self._demand.dtype)

    def free(self) -> None:
        """The region may be another stream's once nothing is written to it any more."""
        self._ahead = None
        for slot in list(self._behind):
            self._wait_for(slot)
        self._freed.append(self._at)

    def _direction(self, slot: int) -> int:
        """A step from the last tile read, or inwards from the end at which a walk begins."""
        if self._last is not None and abs(slot - self._last) == 1:
            return slot - self._last
        return 1 if slot == 0 else -1

    def _load(self, slot: int) -> Transfer:
        self._wait_for(slot)
        tokens = self._demand.tile_tokens[slot]
        return self._medium.load(self._offset(slot), (tokens, *self._row), self._demand.dtype)

    def _wait_for(self, slot: int) -> None:
        writing = self._behind.pop(slot, None)
        if writing is not None:
            writing.result()

    def _offset(self, slot: int) -> int:
        return self._at + slot * self._slot_bytes
