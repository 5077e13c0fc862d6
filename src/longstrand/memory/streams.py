"""Where the streams of a pass live: the walk reads and writes them by tile and does not know."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from longstrand.memory.tiles import Tile


@runtime_checkable
class Stream(Protocol):
    """Rows of one shape, one per token of a pack, read and written by tile."""

    def read(self, tile: Tile) -> Tensor:
        """A tile's rows as they were last written; to be used before the same tile is written again."""

    def write(self, tile: Tile, value: Tensor) -> None:
        """Stores a tile's rows.

        Args:
            value: a view of anything; it may be dropped once this returns, but its memory is not to be written to: a
                copy out of it may still be under way.
        """

    def free(self) -> None:
        """Gives the rows' memory back."""


@runtime_checkable
class Streams(Protocol):
    """Makes the streams of one pass."""

    def new(self, *row: int) -> Stream:
        """A stream with rows of this shape; what it holds before it is written is not defined."""

    def close(self) -> None:
        """Frees all streams and what held them; may be called again."""


class DeviceStreams:
    """Streams as tensors on the model's device: tiles are views, nothing is copied but what is written."""

    def __init__(self, num_tokens: int, like: Tensor) -> None:
        self._num_tokens, self._like = num_tokens, like

    def new(self, *row: int) -> DeviceStream:
        return DeviceStream(self._like.new_empty(self._num_tokens, *row))

    def close(self) -> None:
        """The tensors go with their streams."""


class DeviceStream:
    """One tensor [T, ...]."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def read(self, tile: Tile) -> Tensor:
        return self._rows[tile.rows]

    @torch.no_grad()
    def write(self, tile: Tile, value: Tensor) -> None:
        self._rows[tile.rows] = value

    def free(self) -> None:
        del self._rows
