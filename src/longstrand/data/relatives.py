"""Sequences of relatives, and their control in which the relatives are strangers."""

from __future__ import annotations

import heapq

import numpy as np

from longstrand.data.documents import Documents, Stretches
from longstrand.errors import UserError


def relatives_in_sequences(
    label: np.ndarray, lengths: np.ndarray, length: int, members: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Groups of records, one group per sequence: each record once, its relatives with it, at most `length` letters.

    A family fills sequences of its own and what is left of it shares one with other families; at least `members`
    of a family stand together where its records' lengths allow. The order within a sequence is random, over all its
    families.

    Args:
        label: int64[M], the family of each record; families with fewer than `members` records must be left out.
        lengths: int64[M], letters of each record, at most `length`.
    """
    groups: list[np.ndarray] = []
    by_family = np.argsort(label, kind="stable")
    for family in np.split(by_family, np.flatnonzero(np.diff(label[by_family])) + 1) if len(label) else []:
        groups += _divide(rng.permutation(family), lengths, length, members)
    sequences = _fit(groups, lengths, length)
    return [rng.permutation(np.concatenate(sequence)) for sequence in sequences]


def strangers_for(
    sequences: list[np.ndarray],
    label: np.ndarray,
    stretches: Stretches,
    donors: Stretches,
    donor_label: np.ndarray,
    seed: int,
) -> Documents:
    """The same sequences with every later relative replaced: no two records of a sequence are of one family.

    The first record of each family stays; each following one gives its place to records of families that the
    sequence does not hold, cut to the same total length, so that all positions and lengths stay.

    Args:
        sequences: groups of indices into `stretches` and `label`.
        donors: the records of the same split that may be strangers (relatives among them, and single ones).

    Raises:
        UserError: the split has too few families for a sequence of this length.
    """
    documents = []
    pools = _by_family(donor_label, donors.lengths)
    for number, sequence in enumerate(sequences):
        rng = np.random.default_rng([seed, number])
        own = set(label[sequence])
        free = [family for family in rng.permutation(len(pools)) if pools[family][0] not in own]
        taken: list[Stretches] = []
        seen: set[int] = set()
        for member in sequence:
            if label[member] not in seen:
                seen.add(label[member])
                taken.append(stretches.take(np.array([member])))
                continue
            chosen = _choose_strangers(pools, free, donors.lengths, int(stretches.lengths[member]), rng)
            if chosen is None:
                raise UserError(
                    f"families: the control needs more unrelated records than this split has ({len(pools)} families): "
                    "shorten the sequences or give the split more families"
                )
            taken.append(donors.take(chosen[0]).first(chosen[1]))
        documents.append(Stretches.joined(taken))
    bounds = np.cumsum([0, *map(len, documents)])
    return Documents(Stretches.joined(documents), bounds)


def _divide(family: np.ndarray, lengths: np.ndarray, length: int, members: int) -> list[np.ndarray]:
    """Cuts a family into groups of at most `length` letters, in its order; a small rest borrows from the one before."""
    groups: list[list[int]] = [[]]
    size = 0
    for record in family:
        if size + lengths[record] > length:
            groups.append([])
            size = 0
        groups[-1].append(record)
        size += lengths[record]
    if len(groups) > 1:
        rest, before = groups[-1], groups[-2]
        while len(rest) < members < len(before) and sum(lengths[rest]) + lengths[before[-1]] <= length:
            rest.append(before.pop())
    return [np.array(group) for group in groups]


def _fit(groups: list[np.ndarray], lengths: np.ndarray, length: int) -> list[list[np.ndarray]]:
    """First fit, longest group first, into sequences of at most `length` letters."""
    sizes = [int(lengths[group].sum()) for group in groups]
    sequences: list[list[np.ndarray]] = []
    room: list[tuple[int, int]] = []  # (letters used, sequence): the emptiest first
    for index in sorted(range(len(groups)), key=lambda index: -sizes[index]):
        if room and room[0][0] + sizes[index] <= length:
            used, sequence = heapq.heappop(room)
            sequences[sequence].append(groups[index])
        else:
            used, sequence = 0, len(sequences)
            sequences.append([groups[index]])
        heapq.heappush(room, (used + sizes[index], sequence))
    return sequences


def _by_family(label: np.ndarray, lengths: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(family, its records from short to long) of every family."""
    order = np.lexsort((lengths, label))
    borders = np.flatnonzero(np.diff(label[order])) + 1
    return [(int(label[records[0]]), records) for records in np.split(order, borders)] if len(label) else []


def _choose_strangers(
    pools: list[tuple[int, np.ndarray]],
    free: list[int],
    lengths: np.ndarray,
    need: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Records of unused families and the letters to take of each, `need` in all; removes their families from `free`.

    One record where a free family has one that is long enough, else the longest free ones together.
    """
    for family in free:
        records = pools[family][1]
        long_enough = records[np.searchsorted(lengths[records], need) :]
        if len(long_enough):
            free.remove(family)
            return np.array([rng.choice(long_enough)]), np.array([need])
    chosen, letters = [], []
    while need > 0 and free:
        family = max(free, key=lambda family: lengths[pools[family][1][-1]])
        free.remove(family)
        chosen.append(int(pools[family][1][-1]))
        letters.append(min(need, int(lengths[chosen[-1]])))
        need -= letters[-1]
    return None if need else (np.array(chosen), np.array(letters))
