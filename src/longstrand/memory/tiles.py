"""The tokens of a pack cut into tiles, and what each token needs to know of its document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """Consecutive tokens of a pack, computed at once.

    A document's tokens occupy consecutive *slots*, aligned so that each document starts on a pool: the pool of a slot
    is slot // kpool, and no pool belongs to two documents.
    """

    start: int
    stop: int
    offsets: Int[Tensor, "T"]  # tokens of the same document before each token
    slots: Int[Tensor, "T"]
    first_pool: Int[Tensor, "T"]  # first pool of each token's document
    num_visible: Int[Tensor, "T"]  # complete pools that each token may select from
    first: Bool[Tensor, "T"] | None  # True at a document's first token; None when the tile holds none

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


class PackLayout:
    """Document bounds and pool alignment of a pack; a tile's view is computed on demand (no tensor of length T)."""

    def __init__(self, starts: Int[Tensor, "S1"], kpool: int, device: torch.device) -> None:
        self.starts = starts.to(device)
        self.kpool = kpool
        pools = -(-self.starts.diff() // kpool)
        self.first_pools = torch.cat([pools.new_zeros(1), pools.cumsum(0)])
        self.num_tokens = int(starts[-1])
        self.num_pools = int(self.first_pools[-1])
        self.num_slots = self.num_pools * kpool
        self.device = device

    def tile(self, start: int, stop: int) -> Tile:
        position = torch.arange(start, stop, device=self.device)
        document = torch.searchsorted(self.starts, position, right=True) - 1
        offsets = position - self.starts[document]
        first_pool = self.first_pools[document]
        first = offsets == 0
        return Tile(
            start=start,
            stop=stop,
            offsets=offsets,
            slots=first_pool * self.kpool + offsets,
            first_pool=first_pool,
            num_visible=(offsets + 1) // self.kpool,
            first=first if bool(first.any()) else None,
        )

    def num_tiles(self, size: int) -> int:
        return -(-self.num_tokens // size)

    def tiles(self, size: int) -> Iterator[Tile]:
        """All tiles of at most `size` tokens, first to last."""
        for start in range(0, self.num_tokens, size):
            yield self.tile(start, min(start + size, self.num_tokens))

    def tiles_back(self, size: int) -> Iterator[Tile]:
        """The same tiles, last to first."""
        for start in reversed(range(0, self.num_tokens, size)):
            yield self.tile(start, min(start + size, self.num_tokens))
