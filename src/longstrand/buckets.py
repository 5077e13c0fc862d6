"""Loss by position, without torch: bucket edges, sums per document, bootstrap intervals, gains.

A bucket is a range of positions: `[start, end)` in context tokens, the tokens of the same document before the
target. The last bucket includes its end. Everything here works on sums per document and bucket, so its memory
does not grow with the length of a document, and its results do not depend on how documents were packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from longstrand.errors import UserError

RESAMPLES = 4000
RESAMPLED_ROWS = 4096
EARLY_TOKENS = 1024
_COUNTS_PER_BLOCK = 2**21
_Z975 = NormalDist().inv_cdf(0.975)

Floats = NDArray[np.float64]


class Bucket(TypedDict):
    """One range of positions of one series; `nats`, `low` and `high` are None where nothing was scored."""

    start: int
    end: int
    tokens: int
    nats: float | None
    low: float | None
    high: float | None
    sequences: int


@dataclass(frozen=True)
class BucketSums:
    """What an evaluation keeps of S documents in B buckets.

    Args:
        edges: B + 1 increasing token counts.
        ids: a fingerprint per document (its tokens and weights); it pairs the documents of two evaluations.
        weight: summed target weights, [S, B].
        nats: summed weighted negative log-probabilities, [S, B].
        tokens: targets with a weight above 0, [B].
        masked: targets with weight 0.
        beyond: targets with more context than the last edge; they count nowhere else.
    """

    edges: tuple[int, ...]
    ids: tuple[str, ...]
    weight: Floats
    nats: Floats
    tokens: tuple[int, ...]
    masked: int
    beyond: int


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % bootstrap interval over sequences."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Gain:
    """The relative improvement 1 - after / before over positions start..end; None: nothing was scored."""

    start: int
    end: int
    tokens: int
    sequences: int
    relative: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """Two evaluations of the same documents.

    Args:
        overall: all positions.
        buckets: one gain per bucket.
        early: the buckets inside the first 1,024 tokens (the first bucket, where it is wider).
        late: the buckets of the last octave, half the length and up; None where there is only one bucket.
        late_over_early: ratio of the two gains; None where the early gain is not above 0.
        late_minus_early: their difference, paired over sequences.
        apart: whether the late gain is the larger one and its interval does not overlap the early gain's; None
            where one of them has no interval.
    """

    overall: Gain
    buckets: tuple[Gain, ...]
    early: Gain
    late: Gain | None
    late_over_early: float | None
    late_minus_early: Estimate | None
    apart: bool | None


def default_edges(length: int, buckets: str | int = "doubling") -> list[int]:
    """Edges of the buckets: 0, 1024, 2048, 4096, ... doubling to the length, or equal buckets of one width.

    Raises:
        UserError: a length below 1, or buckets that are neither "doubling" nor a width of at least 1.
    """
    if length < 1:
        raise UserError(f"evaluate.length = {length}: must be at least 1 token")
    if buckets == "doubling":
        inner = [EARLY_TOKENS << octave for octave in range(max(length // EARLY_TOKENS, 1).bit_length())]
    elif isinstance(buckets, int) and buckets >= 1:
        inner = list(range(buckets, length, buckets))
    else:
        raise UserError(f'evaluate.buckets = {buckets!r}: must be "doubling" or the width of equal buckets')
    return [0, *(edge for edge in inner if edge < length), length]


def check_edges(edges: Sequence[int]) -> tuple[int, ...]:
    """The edges as a tuple.

    Raises:
        UserError: fewer than two edges, the first above 1 (no target has less context), or no increase.
    """
    if len(edges) < 2 or edges[0] not in (0, 1) or any(a >= b for a, b in pairwise(edges)):
        raise UserError(f"bucket edges {list(edges)}: must be at least two, start at 0, and increase")
    return tuple(int(edge) for edge in edges)


def mean_nats(sums: BucketSums) -> tuple[list[Bucket], Bucket]:
    """The loss of each bucket and of all: summed nats / summed weight, with intervals over sequences."""
    sums = _in_canonical_order(sums)
    draws_nats, draws_weight = np.split(_resample(np.hstack([sums.nats, sums.weight])), 2, axis=1)
    rows = [
        _mean_row(sums, draws_nats, draws_weight, slice(bucket, bucket + 1))
        for bucket in range(len(sums.edges) - 1)
    ]
    return rows, _mean_row(sums, draws_nats, draws_weight, slice(None))


def compare(before: BucketSums, after: BucketSums) -> Comparison:
    """Relative improvement per bucket and overall, with paired bootstrap intervals over sequences.

    Both evaluations are resampled together, so what makes a sequence hard for both cancels.

    Raises:
        UserError: the two evaluations have other edges or did not score the same documents.
    """
    before, after = _in_canonical_order(before), _in_canonical_order(after)
    if before.edges != after.edges:
        raise UserError(f"bucket edges differ: {list(before.edges)} before, {list(after.edges)} after")
    if before.ids != after.ids:
        raise UserError(
            f"before ({len(before.ids)}) and after ({len(after.ids)}) did not score the same sequences: "
            "evaluate both on the same data with the same masks"
        )
    draws = np.split(_resample(np.hstack([before.nats, after.nats])), 2, axis=1)
    num_buckets = len(before.edges) - 1
    overall, _ = _gain(before, after, draws, range(num_buckets))
    buckets = [_gain(before, after, draws, range(b, b + 1))[0] for b in range(num_buckets)]
    early_end, late_start = early_and_late(before.edges)
    early, early_draws = _gain(before, after, draws, range(early_end))
    if late_start is None:
        return Comparison(overall, tuple(buckets), early, None, None, None, None)
    late, late_draws = _gain(before, after, draws, range(late_start, num_buckets))
    if early.relative is None or late.relative is None:
        return Comparison(overall, tuple(buckets), early, late, None, None, None)
    ratio = late.relative.value / early.relative.value if early.relative.value > 0 else None
    fewest = min(late.sequences, early.sequences)
    difference = _estimate(
        late.relative.value - early.relative.value,
        late_draws - early_draws,
        fewest,
    )
    apart = late.relative.low > early.relative.high if fewest > 1 else None
    return Comparison(overall, tuple(buckets), early, late, ratio, difference, apart)


def loses_late_gain(gain: Comparison, control: Comparison) -> bool | None:
    """Whether the control has lost what late positions gained beyond early ones.

    It has when its late-minus-early interval lies below that of `gain` and its value is less than half. None where
    there was no such gain to lose, or one of the two has no interval.
    """
    mine, theirs = gain.late_minus_early, control.late_minus_early
    if mine is None or theirs is None or min(gain.overall.sequences, control.overall.sequences) < 2:
        return None
    if mine.low <= 0:
        return None
    return theirs.high < mine.low and theirs.value < mine.value / 2


def early_and_late(edges: Sequence[int]) -> tuple[int, int | None]:
    """Two bucket numbers: early are the buckets below the first one, late those from the second one on.

    Early are the buckets inside the first 1,024 tokens, at least the first bucket. Late are those that start
    at half the length or above; None where that leaves no bucket that is not early.
    """
    early_end = max(1, sum(end <= EARLY_TOKENS for end in edges[1:]))
    late = [b for b, start in enumerate(edges[:-1]) if start >= edges[-1] / 2 and b >= early_end]
    return early_end, (late[0] if late else None)


def _mean_row(sums: BucketSums, draws_nats: Floats, draws_weight: Floats, columns: slice) -> Bucket:
    per_document = sums.weight[:, columns].sum(axis=1)
    weight, nats = math.fsum(per_document), math.fsum(sums.nats[:, columns].ravel())
    starts, ends = sums.edges[:-1][columns], sums.edges[1:][columns]
    sequences = int(np.count_nonzero(per_document))
    row = Bucket(
        start=starts[0],
        end=ends[-1],
        tokens=sum(sums.tokens[columns]),
        nats=None,
        low=None,
        high=None,
        sequences=sequences,
    )
    if weight > 0:
        draws = _ratio(draws_nats[:, columns].sum(axis=1), draws_weight[:, columns].sum(axis=1))
        mean = _estimate(nats / weight, draws, sequences)
        row["nats"], row["low"], row["high"] = mean.value, mean.low, mean.high
    return row


def _gain(before: BucketSums, after: BucketSums, draws: list[Floats], columns: range) -> tuple[Gain, Floats]:
    """The gain over some neighbouring buckets, and its value in each resample (NaN: nothing was scored)."""
    here = slice(columns.start, columns.stop)
    sum_before, sum_after = math.fsum(before.nats[:, here].ravel()), math.fsum(after.nats[:, here].ravel())
    sequences = int(np.count_nonzero(before.weight[:, here].sum(axis=1)))
    resampled = 1 - _ratio(draws[1][:, here].sum(axis=1), draws[0][:, here].sum(axis=1))
    relative = None
    if sum_before > 0:
        relative = _estimate(1 - sum_after / sum_before, resampled, sequences)
    gain = Gain(
        start=before.edges[columns.start],
        end=before.edges[columns.stop],
        tokens=sum(before.tokens[here]),
        sequences=sequences,
        relative=relative,
    )
    return gain, resampled


def _resample(columns: Floats) -> Floats:
    """Column sums of RESAMPLES bootstrap draws of the rows, the seed fixed: [S, M] -> [RESAMPLES, M].

    More rows than RESAMPLED_ROWS are first summed into that many groups; their order is that of a hash, so
    the groups are random ones. Drawn in blocks: the counts take at most 16 MiB.
    """
    if not len(columns):
        return np.zeros((RESAMPLES, columns.shape[1]))
    if len(columns) > RESAMPLED_ROWS:
        padded = np.pad(columns, ((0, -len(columns) % RESAMPLED_ROWS), (0, 0)))
        columns = padded.reshape(-1, RESAMPLED_ROWS, columns.shape[1]).sum(axis=0)
    rows = len(columns)
    rng = np.random.default_rng(0)
    block = _COUNTS_PER_BLOCK // rows
    sizes = [min(block, RESAMPLES - first) for first in range(0, RESAMPLES, block)]
    return np.concatenate([rng.multinomial(rows, np.full(rows, 1 / rows), size=n) @ columns for n in sizes])


def _estimate(value: float, draws: Floats, sequences: int) -> Estimate:
    """A value and its expanded percentile interval.

    Each tail is Phi(-sqrt(n / (n - 1)) t), with the 97.5 % t of n - 1 degrees of freedom. Plain percentiles
    are too narrow for few sequences: on log-normal losses they held the true value in 86 % of draws at n = 8,
    these in 92 % (91 % and 93 % at n = 16). One sequence has no spread to resample: both ends equal the
    value, and `sequences` says why.
    Source: Hesterberg, What Teachers Should Know About the Bootstrap (2015), section 4.3.
    """
    finite = draws[np.isfinite(draws)]
    if sequences < 2 or not len(finite):
        return Estimate(value, value, value)
    stretch = math.sqrt(sequences / (sequences - 1)) * _t975(sequences - 1)
    tail = NormalDist().cdf(-stretch)
    low, high = np.quantile(finite, [tail, 1 - tail])
    return Estimate(value, min(float(low), value), max(float(high), value))


def _t975(freedom: int) -> float:
    """97.5 % quantile of Student's t by its expansion in 1 / freedom (1 % low at 5, 0.1 % at 10)."""
    z = _Z975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def _in_canonical_order(sums: BucketSums) -> BucketSums:
    """The same sums with documents ordered by fingerprint, so that a fixed seed draws the same intervals."""
    order = sorted(range(len(sums.ids)), key=sums.ids.__getitem__)
    ids = tuple(sums.ids[i] for i in order)
    return BucketSums(
        sums.edges, ids, sums.weight[order], sums.nats[order], sums.tokens, sums.masked, sums.beyond
    )
