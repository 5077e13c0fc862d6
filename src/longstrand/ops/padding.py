"""What the forms of the ops compute beyond what they are asked for, from their own block sizes.

A percentage of what is needed, 0 where nothing is padded: values that are computed and never used. They are rows that
fill up a block or an expert, lanes beyond a row's end, empty slots of a choice, and pools scored for rows that do not
see them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from longstrand.ops.experts.grouped import rows_taken
from longstrand.ops.kda import CHUNK
from longstrand.ops.native import LANES
from longstrand.ops.select.blockwise import KERNEL_POOLS, KERNEL_ROWS, ROW_BLOCK
from longstrand.plan.rounds import LEAST_ROWS


@dataclass(frozen=True)
class Padding:
    """Attributes:
    percent: computed beyond what is needed.
    of: what it is, in words; empty where nothing is padded.
    """

    percent: float = 0.0
    of: str = ""


NONE = Padding()


@dataclass(frozen=True)
class Tiles:
    """The tiles of one document, or of a rank's parts of it.

    Attributes:
        spans: first and last position (exclusive) of each part.
        size: tokens of a tile.
    """

    spans: Sequence[tuple[int, int]]
    size: int

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """First and last position (exclusive) of each tile."""
        for start, stop in self.spans:
            for at in range(start, stop, self.size):
                yield at, min(at + self.size, stop)

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def rows(self, block: int) -> int:
        """Rows of all tiles, each tile filled up to whole blocks."""
        return sum(_whole(stop - start, block) for start, stop in self)


def of_chunks(tiles: Tiles, widths: Sequence[int], *, native: bool) -> Padding:
    """KDA: a tile's last chunk is filled up; the kernel fills up a head's keys and values to whole vectors, too."""
    width = sum(_whole(each, LANES) for each in widths) if native else sum(widths)
    what = f"chunks of {CHUNK} tokens" + f", heads to {LANES}" * native
    return _padding(tiles.rows(CHUNK) * width, tiles.num_tokens * sum(widths), what)


def of_tokens_in_lanes(tiles: Tiles, *, native: bool) -> Padding:
    """The kernel of hyper-connections takes a token per lane of a vector."""
    return _padding(tiles.rows(LANES), tiles.num_tokens, f"{LANES} tokens at once") if native else NONE


def of_rows(widths: Sequence[int], *, native: bool) -> Padding:
    """A kernel goes over a row in whole vectors."""
    computed = sum(_whole(width, LANES) for width in widths)
    return _padding(computed, sum(widths), f"rows to {LANES}") if native else NONE


def of_scores(tiles: Tiles, *, kpool: int, num_selected: int, native: bool) -> Padding:
    """Selection: rows scored together take all pools that one of them sees; none is scored where all are chosen."""
    block, step = (KERNEL_ROWS, KERNEL_POOLS) if native else (ROW_BLOCK, 1)
    computed = needed = 0
    for start, stop in tiles:
        visible = _visible(start, stop, kpool)
        wanted = torch.where(visible > num_selected, visible, 0)
        needed += int(wanted.sum())
        most = F.pad(wanted, (0, -len(wanted) % block)).view(-1, block).amax(-1)
        rows = torch.full_like(most, block)
        if not native and len(wanted) % block:
            rows[-1] = len(wanted) % block
        computed += int(((most + step - 1) // step * step * rows).sum())
    return _padding(computed, needed, f"{block} rows" + f" x {step} pools" * native + " at once")


def of_selected(tiles: Tiles, *, kpool: int, num_selected: int, width: int, native: bool) -> Padding:
    """Sparse attention: the kernel reads what a token sees, in whole vectors; plain torch every slot of the choice."""
    computed = needed = 0
    for start, stop in tiles:
        seen = _visible(start, stop, kpool).clamp(max=num_selected) * kpool
        seen += torch.arange(start + 1, stop + 1) % kpool  # of the own pool, unless it is complete
        needed += int(seen.sum())
        computed += int(_up(seen).sum()) if native else (num_selected + 1) * kpool * len(seen)
    if native:
        computed, needed = computed * _whole(width, LANES), needed * width
        return _padding(computed, needed, f"tokens, head to {LANES}")
    return _padding(computed, needed, "empty slots")


def of_slots(tiles: Tiles, *, kpool: int, num_selected: int) -> Padding:
    """Slots of a choice that stay empty, since a token sees fewer pools."""
    used = sum(int(_visible(start, stop, kpool).clamp(max=num_selected).sum()) for start, stop in tiles)
    return _padding(num_selected * tiles.num_tokens, used, "empty slots")


def of_experts(tiles: Tiles, *, experts: int, active: int, dtype: torch.dtype, native: bool) -> Padding:
    """Experts: the kernel fills up each one's rows in bfloat16. On average, of tokens that choose evenly at random."""
    if not native or rows_taken(1, dtype) == 1:
        return NONE
    computed = sum(experts * _mean_rows((stop - start) * active, experts, dtype) for start, stop in tiles)
    return _padding(computed, tiles.num_tokens * active, f"an expert's rows to {LEAST_ROWS} or more")


@cache
def _mean_rows(choices: int, experts: int, dtype: torch.dtype) -> float:
    """Of an expert that each choice falls on with the same chance."""
    if experts == 1:
        return float(rows_taken(choices, dtype))
    tokens = torch.arange(choices + 1, dtype=torch.float64)
    ways = math.lgamma(choices + 1) - torch.lgamma(tokens + 1) - torch.lgamma(choices - tokens + 1)
    chance = ways - tokens * math.log(experts) + (choices - tokens) * math.log1p(-1 / experts)
    rows = torch.tensor([rows_taken(each, dtype) for each in range(choices + 1)], dtype=torch.float64)
    return float((chance.exp() * rows).sum())


def _visible(start: int, stop: int, kpool: int) -> Tensor:
    """Complete pools that each position sees."""
    return torch.arange(start + 1, stop + 1) // kpool


def _whole(number: int, step: int) -> int:
    return -(-number // step) * step


def _up(numbers: Tensor) -> Tensor:
    return (numbers + LANES - 1) // LANES * LANES


def _padding(computed: float | int, needed: int, of: str) -> Padding:
    percent = 100 * (computed / needed - 1) if needed else 0.0
    return Padding(round(percent, 2), of) if percent > 0 else NONE
