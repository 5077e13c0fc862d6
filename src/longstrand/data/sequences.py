"""What a source shows in one epoch: windows of its letters, or sequences of relatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from longstrand.data.documents import Documents, Stretches
from longstrand.data.reading import IS_N, TRAINED, Reading
from longstrand.data.relatives import relatives_in_sequences, strangers_for
from longstrand.data.store import NOT_SUPERVISED, Store
from longstrand.errors import UserError

Order = Literal["relatives", "strangers"]


@dataclass
class Skipped:
    """What is never shown, by cause: how many documents (or family members) and how many of their tokens."""

    causes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, cause: str, lengths: np.ndarray) -> None:
        count, tokens = self.causes.get(cause, (0, 0))
        if len(lengths):
            self.causes[cause] = (count + len(lengths), tokens + int(lengths.sum()))


@dataclass(frozen=True)
class WindowSet:
    """The same documents in every epoch: stretches cut into windows of `length` tokens, the last one shorter."""

    documents: Documents
    skipped: Skipped
    num_cut: int

    def in_epoch(self, epoch: int) -> Documents:
        return self.documents


@dataclass(frozen=True)
class FamilyRules:
    """How sequences of relatives are filled.

    Attributes:
        least: records of a family that stand together at the least.
        order: "relatives", or "strangers" for the control.
        n_max: members with a larger part of N are skipped.
    """

    least: int
    seed: int
    order: Order
    n_max: float


@dataclass(frozen=True)
class FamilySet:
    """Sequences of relatives, newly mixed in every epoch; every member once per epoch.

    Attributes:
        members: the stretches that stand together, each at most `length` letters.
        label: their families.
        donors, donor_label: what may stand in for a relative in the control: all of the split, single ones too.
    """

    members: Stretches
    label: np.ndarray
    donors: Stretches
    donor_label: np.ndarray
    length: int
    rules: FamilyRules
    skipped: Skipped
    num_cut: int

    def in_epoch(self, epoch: int) -> Documents:
        rng = np.random.default_rng([self.rules.seed, epoch])
        groups = relatives_in_sequences(self.label, self.members.lengths, self.length, self.rules.least, rng)
        if self.rules.order == "relatives":
            return Documents.of_groups(self.members, groups)
        seed = int(rng.integers(2**62))
        return strangers_for(groups, self.label, self.members, self.donors, self.donor_label, seed)


SequenceSet = WindowSet | FamilySet


def cut_windows(stretches: Stretches, length: int) -> Stretches:
    """Consecutive windows of `length` from each stretch's start, the last one with what is left."""
    counts = -(-stretches.lengths // length)
    origin = np.repeat(np.arange(len(stretches)), counts)
    number = np.arange(len(origin)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = stretches.start[origin] + number * length
    end = np.minimum(start + length, stretches.end[origin])
    return Stretches(stretches.store[origin], start, end, stretches.turned[origin])


def window_set(
    stores: Sequence[Store], reading: Reading, stretches: Stretches, length: int, n_max: float
) -> WindowSet:
    """Windows of the stretches; those that are mostly N, one token long, or without a target are skipped and counted.

    Raises:
        UserError: a row with prompt or loss_mask that is longer than `length` (a cut would sever answers from
            their prompts).
    """
    _refuse_long_rows(stores, stretches, length)
    windows, skipped = cut_windows(stretches, length), Skipped()
    windows = _skip(windows, windows.lengths < 2, "one_token", skipped)
    counts = reading.counts(stores, windows)
    mostly_n = counts[:, IS_N] > n_max * windows.lengths
    windows, counts = _skip(windows, mostly_n, "mostly_n", skipped), counts[~mostly_n]
    _, first = reading.document_counts(stores, Documents.of_one_stretch_each(windows))
    no_target = counts[:, TRAINED] - first[:, TRAINED] <= 0
    windows = _skip(windows, no_target, "no_target", skipped)
    num_cut = int((stretches.lengths > length).sum())
    return WindowSet(Documents.of_one_stretch_each(windows), skipped, num_cut)


def family_set(
    stores: Sequence[Store],
    reading: Reading,
    stretches: Stretches,
    label: np.ndarray,
    length: int,
    rules: FamilyRules,
) -> FamilySet:
    """Sequences of the stretches' families; one longer than `length` becomes consecutive members of its family.

    Members that are mostly N, and those whose family has fewer than `rules.least` records here, are skipped and
    counted.
    """
    skipped = Skipped()
    pieces = cut_windows(stretches, length)
    origin = np.repeat(np.arange(len(stretches)), -(-stretches.lengths // length))
    mostly_n = reading.counts(stores, pieces)[:, IS_N] > rules.n_max * pieces.lengths
    donors, origin = _skip(pieces, mostly_n, "mostly_n", skipped), origin[~mostly_n]
    donor_label = label[origin]
    records = np.unique(np.stack([donor_label, origin]), axis=1)[0]
    sizes = np.bincount(records, minlength=int(label.max(initial=0)) + 1)
    alone = sizes[donor_label] < rules.least
    return FamilySet(
        members=_skip(donors, alone, "too_few_relatives", skipped),
        label=donor_label[~alone],
        donors=donors,
        donor_label=donor_label,
        length=length,
        rules=rules,
        skipped=skipped,
        num_cut=int((stretches.lengths > length).sum()),
    )


def _skip(stretches: Stretches, which: np.ndarray, cause: str, skipped: Skipped) -> Stretches:
    skipped.add(cause, stretches.lengths[which])
    return stretches.take(np.flatnonzero(~which))


def _refuse_long_rows(stores: Sequence[Store], stretches: Stretches, length: int) -> None:
    for at in np.flatnonzero(stretches.lengths > length):
        store, start, end = stores[stretches.store[at]], int(stretches.start[at]), int(stretches.end[at])
        if store.marks is not None and (store.marks[start:end] & NOT_SUPERVISED).any():
            raise UserError(
                f"{store.source}:{store.lines[store.record_at(start)]}: {end - start:,} tokens with a prompt or "
                f"loss_mask exceed length = {length:,}, and such rows are not cut; raise data.length or shorten the row"
            )
