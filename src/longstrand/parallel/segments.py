"""Which tokens of a pack each rank computes: the row cut into segments, dealt so that attention costs all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

SEGMENTS = (2, 4, 8, 16)
"""Segments per rank that are tried, fewest first."""

BALANCED = 1.10
"""Largest over mean of visible pairs that needs no more segments."""


@dataclass(frozen=True)
class Deal:
    """Segments [edges[i], edges[i + 1]) of a pack, and the rank of each.

    Attributes:
        pairs: visible (query, key) pairs of each rank.
    """

    edges: tuple[int, ...]
    owners: tuple[int, ...]
    pairs: tuple[int, ...]

    def owned_by(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The segments of a rank as (start, stop), first to last."""
        spans = zip(pairwise(self.edges), self.owners, strict=True)
        return tuple(span for span, owner in spans if owner == rank)

    @property
    def imbalance(self) -> float:
        """Largest over mean of the visible pairs per rank; 1 is even."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs)


def deal(starts: Sequence[int] | np.ndarray, num_ranks: int, segments_per_rank: int | None = None) -> Deal:
    """Cuts a pack and deals its segments.

    Segments are equal in length to a token, and every rank has as many. One document: early and late ones in pairs,
    which is even to the pair. Several: the heaviest segment first, each to the rank with the fewest pairs that has
    room. Empty segments of a pack shorter than their number are left out.

    Args:
        starts: where documents start, and the end: `Pack.starts`.
        num_ranks: of the context axis.
        segments_per_rank: None: the smallest of `SEGMENTS` that is balanced, else the one that comes closest.
    """
    tries = SEGMENTS if segments_per_rank is None else (segments_per_rank,)
    best: Deal | None = None
    for per_rank in tries:
        found = _deal(np.asarray(starts, dtype=np.int64), num_ranks, per_rank)
        if best is None or found.imbalance < best.imbalance:
            best = found
        if best.imbalance <= BALANCED:
            break
    assert best is not None
    return best


def visible_pairs(starts: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Pairs (query, key) with the query before each position: the sum of offset + 1 over the tokens before it."""
    lengths = np.diff(starts)
    before = np.concatenate([[0], np.cumsum(lengths * (lengths + 1) // 2)])
    document = np.searchsorted(starts, positions, side="right") - 1
    inside = positions - starts[document]
    return before[document] + inside * (inside + 1) // 2


def _deal(starts: np.ndarray, num_ranks: int, per_rank: int) -> Deal:
    count, length = per_rank * num_ranks, int(starts[-1])
    edges = np.arange(count + 1, dtype=np.int64) * length // count
    pairs = np.diff(visible_pairs(starts, edges))
    if len(starts) == 2 and per_rank % 2 == 0:
        owners = np.arange(count) % (2 * num_ranks)
        owners = np.minimum(owners, 2 * num_ranks - 1 - owners)
    else:
        owners = _heaviest_first(pairs, num_ranks, per_rank)
    load = np.bincount(owners, weights=pairs, minlength=num_ranks)
    kept = np.diff(edges) > 0
    return Deal(
        (*edges[:-1][kept].tolist(), length),
        tuple(owners[kept].tolist()),
        tuple(int(value) for value in load),
    )


def _heaviest_first(pairs: np.ndarray, num_ranks: int, per_rank: int) -> np.ndarray:
    owners = np.empty(len(pairs), dtype=np.int64)
    load, room = np.zeros(num_ranks, dtype=np.int64), np.full(num_ranks, per_rank)
    for segment in np.argsort(-pairs, kind="stable"):
        open_ranks = np.flatnonzero(room)
        rank = open_ranks[np.argmin(load[open_ranks])]
        owners[segment] = rank
        load[rank] += pairs[segment]
        room[rank] -= 1
    return owners
