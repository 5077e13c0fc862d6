"""Held-out loss by position: how well a model uses the context that stands before each token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from longstrand.buckets import Bucket, BucketSums, Comparison, check_edges, compare, default_edges, mean_nats
from longstrand.data import Pack
from longstrand.data.pack import NO_TARGET
from longstrand.errors import CheckFailed, UserError
from longstrand.series import Series, append_series, series_from

__all__ = [
    "Comparison",
    "ScoresTokens",
    "append_series",
    "by_position",
    "compare",
    "default_edges",
    "evaluate_series",
    "sum_by_position",
]


class ScoresTokens(Protocol):
    """What evaluation needs of a model."""

    def token_logprobs(self, pack: Pack, tile: int = 1024) -> Tensor:
        """Natural log-probability of each target of the pack, [T]."""
        ...


def by_position(model: ScoresTokens, packs: Iterable[Pack], edges: Sequence[int], tile: int) -> list[Bucket]:
    """Mean loss by the number of context tokens: of the same document, before the target.

    nats = summed weight * -log p / summed weight over all documents, so the value does not depend on how the
    documents are packed. Bucket [start, end) holds the targets with start..end-1 context tokens, the last one
    also those with exactly its end. `low` and `high` bound a 95 % bootstrap interval over documents with a
    fixed seed; with one document they equal `nats` (see `sequences`). An empty bucket: tokens 0, nats None.

    Raises:
        UserError: edges that do not increase, or targets with more context than the last edge; to count those
            instead, use `evaluate_series`.
        CheckFailed: a log-probability that is not finite.
    """
    sums = sum_by_position(model, packs, edges, tile)
    if sums.beyond:
        raise UserError(
            f"{sums.beyond:,} targets have more context than the last bucket edge ({edges[-1]:,} tokens): "
            "raise the length, or cut the sequences"
        )
    return mean_nats(sums)[0]


def evaluate_series(
    model: ScoresTokens, packs: Iterable[Pack], edges: Sequence[int], tile: int, name: str, step: int
) -> Series:
    """One evaluation as evaluate.json holds it: buckets, totals, and sums per document for paired intervals.

    Targets with more context than the last edge are counted in `beyond`, those with weight 0 in `masked`.

    Raises:
        UserError: edges that do not increase.
        CheckFailed: a log-probability that is not finite.
    """
    return series_from(sum_by_position(model, packs, edges, tile), name, step)


def sum_by_position(
    model: ScoresTokens, packs: Iterable[Pack], edges: Sequence[int], tile: int
) -> BucketSums:
    """Sums per document and bucket; packs are drawn one at a time and none is kept."""
    edges = check_edges(edges)
    ids: list[str] = []
    parts: list[np.ndarray] = []
    tokens = np.zeros(len(edges) - 1, dtype=np.int64)
    masked = beyond = 0
    for pack in packs:
        nats = _target_nats(model, pack, tile, len(ids))
        bucket = _bucket_of_targets(pack, edges)
        scored = (pack.targets != NO_TARGET) & (pack.weight != 0)
        masked += int((pack.targets != NO_TARGET).sum() - scored.sum())
        beyond += int((scored & (bucket == len(tokens))).sum())
        scored &= bucket < len(tokens)
        tokens += np.bincount(bucket[scored].numpy(), minlength=len(tokens))
        parts.append(_document_sums(pack, nats, bucket, scored, len(tokens)))
        ids.extend(_fingerprints(pack))
    weight, nats_sums = np.concatenate(parts, axis=1) if parts else np.zeros((2, 0, len(tokens)))
    return BucketSums(edges, tuple(ids), weight, nats_sums, tuple(tokens.tolist()), masked, beyond)


def _target_nats(model: ScoresTokens, pack: Pack, tile: int, documents_before: int) -> Tensor:
    """-log p of each target in float64, [T]; 0 where there is no target."""
    if bool((pack.weight < 0).any()):
        raise UserError("evaluation: a target has a negative weight; weights must be 0 or above")
    with torch.no_grad():
        logprobs = model.token_logprobs(pack, tile=tile).detach().to("cpu", torch.float64)
    bad = ~torch.isfinite(logprobs) & (pack.targets != NO_TARGET)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        document = documents_before + int(torch.searchsorted(pack.starts, first, right=True)) - 1
        raise CheckFailed(
            f"evaluation: {int(bad.sum()):,} log-probabilities are not finite, the first in document "
            f"{document} at token {int(pack.offsets[first]):,}; the weights or the precision are at fault"
        )
    return -logprobs


def _bucket_of_targets(pack: Pack, edges: Sequence[int]) -> Tensor:
    """Bucket of each position's target, [T]; B beyond the last edge."""
    context = pack.offsets + 1
    bucket = torch.bucketize(context, torch.tensor(edges), right=True) - 1
    return torch.where(context == edges[-1], len(edges) - 2, bucket)


def _document_sums(pack: Pack, nats: Tensor, bucket: Tensor, scored: Tensor, num_buckets: int) -> np.ndarray:
    """Summed weights and summed weighted nats of each document and bucket: [2, S, B] in float64."""
    document = torch.arange(pack.num_documents).repeat_interleave(pack.lengths)
    cell = (document * num_buckets + bucket)[scored].numpy()
    weight = pack.weight.double()[scored].numpy()
    shape, cells = (pack.num_documents, num_buckets), pack.num_documents * num_buckets
    summed = [
        np.bincount(cell, weights=values, minlength=cells).reshape(shape)
        for values in (weight, weight * nats[scored].numpy())
    ]
    return np.stack(summed)


def _fingerprints(pack: Pack) -> list[str]:
    """A hash of each document's tokens and weights."""
    found = []
    for start, end in zip(pack.starts[:-1].tolist(), pack.starts[1:].tolist(), strict=True):
        digest = hashlib.blake2b(pack.tokens[start:end].contiguous().numpy().tobytes(), digest_size=8)
        digest.update(pack.weight[start:end].contiguous().numpy().tobytes())
        found.append(digest.hexdigest())
    return found
