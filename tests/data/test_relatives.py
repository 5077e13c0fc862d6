"""Sequences of relatives and their control."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstrand.data.documents import Stretches
from longstrand.data.relatives import relatives_in_sequences, strangers_for
from longstrand.errors import UserError


def stretches_of(lengths: list[int]) -> Stretches:
    ends = np.cumsum(lengths)
    return Stretches(np.zeros(len(ends), np.int64), ends - lengths, ends, np.zeros(len(ends), bool))


@settings(max_examples=200, deadline=None)
@given(
    records=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), min_size=1, max_size=60),
    length=st.integers(50, 200),
    seed=st.integers(0, 9),
)
def test_each_record_stands_once_in_a_sequence_that_is_not_too_long(
    records: list[tuple[int, int]], length: int, seed: int
) -> None:
    label, lengths = np.array(records).T
    found = relatives_in_sequences(label, lengths, length, 2, np.random.default_rng(seed))
    assert sorted(np.concatenate(found).tolist()) == list(range(len(records)))
    assert all(lengths[sequence].sum() <= length for sequence in found)


def test_no_record_of_a_large_family_stands_alone() -> None:
    label, lengths = np.repeat([0, 1, 2], [21, 5, 2]), np.full(28, 10)
    for seed in range(20):
        for sequence in relatives_in_sequences(label, lengths, 100, 2, np.random.default_rng(seed)):
            assert np.unique(label[sequence], return_counts=True)[1].min() >= 2


def test_the_control_keeps_positions_and_lengths_and_holds_no_relatives() -> None:
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(40), rng.integers(1, 6, 40))
    lengths = rng.integers(20, 60, len(label))
    donors = stretches_of(lengths.tolist())
    usable = np.flatnonzero(np.bincount(label)[label] >= 2)
    stretches = donors.take(usable)
    sequences = relatives_in_sequences(label[usable], stretches.lengths, 300, 2, rng)
    control = strangers_for(sequences, label[usable], stretches, donors, label, seed=3)
    family_at = np.repeat(label, lengths)
    assert control.lengths.tolist() == [stretches.lengths[sequence].sum() for sequence in sequences]
    for number, sequence in enumerate(sequences):
        own = control.stretches_of(number)
        shown = family_at[own.start].tolist()
        assert len(set(shown)) == len(shown)
        assert set(stretches.lengths[sequence].cumsum().tolist()) <= set(own.lengths.cumsum().tolist())
        starts = [label[usable][member] for member in sequence]
        firsts = [at for at, family in enumerate(starts) if family not in starts[:at]]
        kept = [stretches.start[sequence[at]] for at in firsts]
        assert set(kept) <= set(own.start.tolist())


def test_too_few_families_for_a_control_is_said() -> None:
    label, stretches = np.array([0, 0, 0, 1]), stretches_of([10, 10, 10, 10])
    with pytest.raises(UserError, match="2 families"):
        strangers_for([np.array([0, 1, 2])], label, stretches, stretches, label, seed=0)
