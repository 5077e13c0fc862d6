"""Families: records that share a k-mer on either strand, directly or through other records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from longstrand.data.letters import reverse_complement
from longstrand.errors import UserError

_BATCH_LETTERS = 1 << 22
_PASS_KMERS = 1 << 24  # sorted at once: about 30 bytes each, 0.5 GB
_MIXER = np.uint64(0x9E3779B97F4A7C15)
_OUTSIDE = 4


@dataclass(frozen=True)
class Families:
    """The family of each record.

    Attributes:
        label: int64[R]; equal labels are relatives; labels are 0, 1, ... in order of their first record.
        turned: bool[R]; the record reads along its family on the other strand. All False in a family whose
            k-mers contradict each other (inverted repeats).
        contradicted: number of such families.
        lengths: int64[R]; letters of each record.
    """

    label: np.ndarray
    turned: np.ndarray
    contradicted: int
    lengths: np.ndarray


def find_families(records: Sequence[np.ndarray], k: int = 31) -> Families:
    """Connected components of records under "shares a k-mer, on either strand".

    K-mers of A, C, G, T (U reads as T) in either case count; records with equal letters are relatives however short.
    Time is that of sorting all k-mers; memory is bounded by `_PASS_KMERS` (more k-mers take more passes, each over
    the k-mers whose hash falls to it) plus 8 bytes per record.

    Args:
        records: uint8 letters of each record (views of a memory map are fine).
        k: odd, 3..31 (an even one has k-mers that equal their own other strand).
    """
    if k % 2 == 0 or not 3 <= k <= 31:
        raise UserError(f"families: kmer = {k}; it must be odd and between 3 and 31")
    num_records = len(records)
    num_passes = max(1, -(-sum(len(record) for record in records) // _PASS_KMERS))
    label = np.arange(2 * num_records)  # node r: the record as it stands; node r + R: its other strand
    for index in range(num_passes):
        label = _join(label, *_shared_kmers(records, k, index, num_passes))
        if not label.any():  # one family already, on contradicting strands
            break
    label = _join(label, *_equal_short_records(records, k))
    return _name_families(label, np.array([len(record) for record in records], np.int64))


def connect(label: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Labels after joining `first[i]` with `second[i]`: each node carries the smallest node of its component.

    Args:
        label: a labelling of that kind (`arange` at the start).
    """
    label = label.copy()
    while True:
        a, b = label[first], label[second]
        apart = a != b
        if not apart.any():
            return label
        first, second, a, b = first[apart], second[apart], a[apart], b[apart]
        np.minimum.at(label, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(jumped := label[label], label):
            label = jumped


def kmers(codes: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(uint64[n-k+1] forward, uint64[n-k+1] other strand): k-mers at each position, two bits per letter.

    Built by doubling: windows of 1, 2, 4, ... letters, joined for the bits of k. Positions whose window holds a
    code of 4 (not a base) have no meaning.
    """
    forward: np.ndarray = np.zeros(len(codes) + 1, np.uint64)  # windows of 0 letters
    backward = forward
    f_power: np.ndarray = (codes & 3).astype(np.uint64)
    b_power = np.uint64(3) - f_power
    done, width = 0, 1
    while width <= k:
        if k & width:  # append a window of `width` letters behind the `done` letters we have
            count = len(codes) - (done + width) + 1
            forward = (forward[:count] << np.uint64(2 * width)) | f_power[done : done + count]
            backward = backward[:count] | (b_power[done : done + count] << np.uint64(2 * done))
            done += width
        count = len(codes) - 2 * width + 1
        if count <= 0 or 2 * width > k:
            break
        shift = np.uint64(2 * width)
        f_power = (f_power[:count] << shift) | f_power[width : width + count]
        b_power = b_power[:count] | (b_power[width : width + count] << shift)
        width *= 2
    return forward, backward


def _join(label: np.ndarray, first: np.ndarray, second: np.ndarray, opposite: np.ndarray) -> np.ndarray:
    """Joins records on the same (opposite = 0) or on opposite strands (1), in both mirror images."""
    num_records = len(label) // 2
    swap = opposite * num_records
    return connect(
        label,
        np.concatenate([first, first + num_records]),
        np.concatenate([second + swap, second + num_records - swap]),
    )


def _codes() -> np.ndarray:
    table = np.full(256, _OUTSIDE, np.uint8)
    for code, letters in enumerate((b"Aa", b"Cc", b"Gg", b"TtUu")):
        table[list(letters)] = code
    return table


def _batches(records: Sequence[np.ndarray], k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(codes, record) of neighbouring records, about `_BATCH_LETTERS` at once, a separator after each piece."""
    table = _codes()
    codes: list[np.ndarray] = []
    owner: list[int] = []
    size = 0
    for index, record in enumerate(records):
        for start in range(0, max(len(record) - k + 1, 0), _BATCH_LETTERS):
            piece = table[record[start : start + _BATCH_LETTERS + k - 1]]
            codes.append(np.append(piece, np.uint8(_OUTSIDE)))
            owner.append(index)
            size += len(codes[-1])
            if size >= _BATCH_LETTERS:
                yield np.concatenate(codes), np.repeat(owner, [len(piece) for piece in codes])
                codes, owner, size = [], [], 0
    if codes:
        yield np.concatenate(codes), np.repeat(owner, [len(piece) for piece in codes])


def _shared_kmers(
    records: Sequence[np.ndarray], k: int, index: int, num_passes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges (record, record, on opposite strands) between neighbours in the sorted k-mers of one pass."""
    keys, nodes = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for codes, owner in _batches(records, k):
        forward, backward = kmers(codes, k)
        outside = np.concatenate([[0], np.cumsum(codes == _OUTSIDE)])
        chosen = outside[k:] == outside[:-k]
        canonical = np.minimum(forward, backward)
        if num_passes > 1:
            mixed = (canonical * _MIXER) >> np.uint64(33)
            chosen &= mixed % np.uint64(num_passes) == index
        keys.append(canonical[chosen])
        nodes.append(owner[: len(chosen)][chosen] * 2 + (backward < forward)[chosen])
    key, node = np.concatenate(keys), np.concatenate(nodes)
    order = np.argsort(key)
    key, node = key[order], node[order]
    record = node >> 1
    edge = np.flatnonzero((key[1:] == key[:-1]) & (record[1:] != record[:-1]))
    opposite = (node[edge] ^ node[edge + 1]) & 1
    pair = np.unique((record[edge] * len(records) + record[edge + 1]) * 2 + opposite)
    first, second = np.divmod(pair >> 1, len(records))
    return first, second, pair & 1


def _equal_short_records(records: Sequence[np.ndarray], k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Edges between records with equal letters on either strand that are too short or too unclear for a k-mer."""
    seen: dict[bytes, tuple[int, int]] = {}
    edges: list[tuple[int, int, int]] = []
    table = _codes()
    for index, record in enumerate(records):
        if len(record) >= k and not _is_unclear(table[record], k):
            continue
        text = record.tobytes().upper().replace(b"U", b"T")
        other = reverse_complement(np.frombuffer(text, np.uint8)).tobytes()
        strand = int(other < text)
        first, first_strand = seen.setdefault(min(text, other), (index, strand))
        if first != index:
            edges.append((first, index, (strand ^ first_strand) if text != other else 0))
    return tuple(np.array(edges, np.int64).reshape(-1, 3).T)  # type: ignore[return-value]


def _is_unclear(codes: np.ndarray, k: int) -> bool:
    outside = np.concatenate([[-1], np.flatnonzero(codes == _OUTSIDE), [len(codes)]])
    return bool(np.diff(outside).max() <= k)


def _name_families(label: np.ndarray, lengths: np.ndarray) -> Families:
    num_records = len(lengths)
    plus, minus = label[:num_records], label[num_records:]
    contradicted = plus == minus
    # A family's two strands are mirror components; the one that holds its first record as it stands is "forward".
    component = np.minimum(plus, minus)
    turned = (plus > minus) & ~contradicted
    _, first, names = np.unique(component, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return Families(
        label=rank[names] if num_records else np.empty(0, np.int64),
        turned=turned,
        contradicted=len(np.unique(component[contradicted])),
        lengths=lengths,
    )
