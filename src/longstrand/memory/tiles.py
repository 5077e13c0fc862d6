"""The tokens of a pack that a rank computes, cut into tiles, and what each token needs to know of its document."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longstrand.parallel import Axis, Deal
from longstrand.parallel.halo import Halo


@dataclass(frozen=True)
class Tile:
    """Consecutive tokens of a pack, computed at once.

    A document's tokens occupy consecutive *slots*, aligned so that each document starts on a pool: the pool of a slot
    is slot // kpool, and no pool belongs to two documents. The pools that a token may select from are counted through
    the whole pack; on several ranks the slots are rows of what the ranks gather, in the order of ranks.
    """

    start: int  # among the tokens of this rank
    stop: int
    offsets: Int[Tensor, "T"]  # tokens of the same document before each token
    slots: Int[Tensor, "T"]
    first_pool: Int[Tensor, "T"]  # first pool of each token's document
    num_visible: Int[Tensor, "T"]  # complete pools that each token may select from
    first: Bool[Tensor, "T"] | None  # True at a document's first token; None when the tile holds none
    index: int = 0  # among the tiles of this rank
    at: int = 0  # the first token's position in the pack

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """Among the tokens of this rank."""
        return slice(self.start, self.stop)

    @property
    def positions(self) -> slice:
        """Among the tokens of the pack."""
        return slice(self.at, self.at + len(self))


@dataclass(frozen=True)
class Shard:
    """A rank's part of a pack: who shares it, and who computes what."""

    axis: Axis
    deal: Deal


class PackLayout:
    """Document bounds and pool alignment of a pack; a tile's view is computed on demand (no tensor of length T).

    Attributes:
        segments: the tokens of this rank, as [start, stop) in the pack, first to last.
        num_tokens: of this rank.
        num_pools: pools of the latents' buffer; `kpool` slots each.
        most_tiles: of the rank with the most among those that share weights or experts with this one; None where there
            is none.
    """

    def __init__(
        self, starts: Int[Tensor, "S1"], kpool: int, device: torch.device, shard: Shard | None = None
    ) -> None:
        self.most_tiles: int | None = None
        self.starts, self.kpool, self.device, self.shard = starts.to(device), kpool, device, shard
        pools = -(-self.starts.diff() // kpool)
        self.first_pools = torch.cat([pools.new_zeros(1), pools.cumsum(0)])
        self.num_pack_tokens = int(starts[-1])
        self.segments: tuple[tuple[int, int], ...] = ((0, self.num_pack_tokens),)
        self.blocks: PoolBlocks | None = None
        self.num_pools = int(self.first_pools[-1])
        if shard is not None:
            self.segments = shard.deal.owned_by(shard.axis.rank)
            self.blocks = PoolBlocks(self, shard)
            self.num_pools = self.blocks.num_pools
        self._bounds = [0, *accumulate(stop - start for start, stop in self.segments)]
        self.num_tokens = self._bounds[-1]
        self.num_slots = self.num_pools * kpool

    def tile(self, start: int, stop: int, index: int = 0) -> Tile:
        """The tile of this rank's tokens [start, stop), which lie in one segment."""
        segment = bisect_right(self._bounds, start) - 1
        at = self.segments[segment][0] + start - self._bounds[segment]
        position = torch.arange(at, at + stop - start, device=self.device)
        document = torch.searchsorted(self.starts, position, right=True) - 1
        offsets = position - self.starts[document]
        first_pool = self.first_pools[document]
        first = offsets == 0
        moved = 0 if self.blocks is None else self.blocks.moved[segment]
        return Tile(
            start=start,
            stop=stop,
            offsets=offsets,
            slots=(first_pool + moved) * self.kpool + offsets,
            first_pool=first_pool,
            num_visible=(offsets + 1) // self.kpool,
            first=first if bool(first.any()) else None,
            index=index,
            at=at,
        )

    def pools_of(self, positions: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        """The pool of each position, counted through the pack."""
        document = torch.searchsorted(self.starts, positions, right=True) - 1
        return self.first_pools[document] + (positions - self.starts[document]) // self.kpool

    def num_tiles(self, size: int) -> int:
        return sum(-(-(stop - start) // size) for start, stop in self.segments)

    def tiles(self, size: int) -> Iterator[Tile]:
        """All tiles of at most `size` tokens, first to last; none spans two segments."""
        return (self.tile(*span) for span in self._spans(size))

    def tiles_back(self, size: int) -> Iterator[Tile]:
        """The same tiles, last to first."""
        return (self.tile(*span) for span in reversed(self._spans(size)))

    def segment_tiles(self, size: int) -> list[SegmentTiles]:
        """The tiles of each segment."""
        spans = self._spans(size)
        return [
            SegmentTiles(self, number, [span for span in spans if start <= span[0] < stop])
            for number, (start, stop) in enumerate(zip(self._bounds, self._bounds[1:], strict=False))
        ]

    @cached_property
    def _halos(self) -> dict[int, Halo]:
        return {}

    def halo(self, depth: int) -> Halo:
        """The exchange of the `depth` rows before each segment; needs a shard."""
        assert self.shard is not None
        if depth not in self._halos:
            self._halos[depth] = Halo(self.shard.axis, self.shard.deal, self.starts.tolist(), depth)
        return self._halos[depth]

    def _spans(self, size: int) -> list[tuple[int, int, int]]:
        """(start, stop, index) of each tile."""
        spans: list[tuple[int, int, int]] = []
        for begin, end in zip(self._bounds, self._bounds[1:], strict=False):
            for start in range(begin, end, size):
                spans.append((start, min(start + size, end), len(spans)))
        return spans


@dataclass(frozen=True)
class SegmentTiles:
    """The tiles of one segment, made when they are asked for."""

    layout: PackLayout
    number: int  # of the segment, among those of this rank
    spans: list[tuple[int, int, int]]

    def __iter__(self) -> Iterator[Tile]:
        return (self.layout.tile(*span) for span in self.spans)

    def back(self) -> Iterator[Tile]:
        """Last to first."""
        return (self.layout.tile(*span) for span in reversed(self.spans))


class PoolBlocks:
    """Where each pool lies among what the ranks gather: a block of equal size per rank, its segments in a row.

    A pool that several segments share lies in each of them; the copy of its last one holds all of its tokens (those of
    earlier segments are fetched), and is the one that queries select.

    Attributes:
        num_pools: of all blocks together.
        own: this rank's block.
        moved: of each of this rank's segments, how far its pools lie behind their place in the pack.
        rows: row of each pool of the pack.
    """

    def __init__(self, layout: PackLayout, shard: Shard) -> None:
        edges = torch.tensor(shard.deal.edges, device=layout.device)
        low = layout.pools_of(edges[:-1]).tolist()
        high = (layout.pools_of(edges[1:] - 1) + 1).tolist()
        filled = [0] * shard.axis.size
        begins: list[int] = []  # of each segment in its rank's block
        for owner, first, last in zip(shard.deal.owners, low, high, strict=True):
            begins.append(filled[owner])
            filled[owner] += last - first
        block = max(filled)
        self.num_pools, rank = block * shard.axis.size, shard.axis.rank
        self.own = slice(rank * block, (rank + 1) * block)
        self.rows = torch.empty(int(layout.first_pools[-1]), dtype=torch.int64, device=layout.device)
        moved = []
        for owner, begin, first, last in zip(shard.deal.owners, begins, low, high, strict=True):
            row = owner * block + begin
            self.rows[first:last] = torch.arange(row, row + last - first, device=layout.device)
            moved.append(row - first)
        self.moved = [by for by, owner in zip(moved, shard.deal.owners, strict=True) if owner == rank]
