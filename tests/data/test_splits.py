"""Splits: their sizes, and that no letter stands on both sides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstrand.data.documents import Stretches
from longstrand.data.ingest import open_fasta
from longstrand.data.splits import (
    HELD_OUT,
    TRAIN,
    VALIDATION,
    check_apart,
    contents_of,
    split_regions,
    split_units,
)
from longstrand.errors import UserError


@given(
    sizes=st.lists(st.integers(1, 30), min_size=3, max_size=80),
    units=st.integers(3, 9),
    seed=st.integers(0, 5),
)
def test_a_unit_stands_on_one_side_and_no_part_is_empty(sizes: list[int], units: int, seed: int) -> None:
    unit = np.arange(len(sizes)) % units
    if len(set(unit.tolist())) < 3:
        return
    part = split_units(unit, np.array(sizes), (0.1, 0.2), seed, "record")
    assert {len({*part[unit == u].tolist()}) for u in set(unit.tolist())} == {1}
    assert set(part.tolist()) == {TRAIN, VALIDATION, HELD_OUT}


def test_many_equal_units_give_the_shares_that_were_asked_for() -> None:
    part = split_units(np.arange(200), np.full(200, 7), (0.1, 0.25), 3, "record")
    assert [int((part == p).sum()) for p in (TRAIN, VALIDATION, HELD_OUT)] == [130, 20, 50]
    again = split_units(np.arange(200), np.full(200, 7), (0.1, 0.25), 3, "record")
    other = split_units(np.arange(200), np.full(200, 7), (0.1, 0.25), 4, "record")
    assert (part == again).all() and (part != other).any()


def test_a_huge_unit_trains_and_the_others_are_held_out() -> None:
    part = split_units(np.arange(11), np.array([1000] + [10] * 10), (0.0, 0.05), 0, "family")
    assert part[0] == TRAIN and (part == HELD_OUT).sum() == 5 and VALIDATION not in part


def test_too_few_units_are_refused() -> None:
    with pytest.raises(UserError, match=r'1 record cannot fill 3 parts; .*"region"'):
        split_units(np.array([4, 4]), np.array([5, 5]), (0.1, 0.1), 0, "record")


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=9),
    st.sampled_from([(0.1, 0.1), (0.0, 0.3), (0.5, 0.0)]),
)
def test_regions_are_cut_into_three_without_a_gap(lengths: list[int], shares: tuple[float, float]) -> None:
    ends = np.cumsum(lengths)
    whole = Stretches(np.zeros(len(ends), np.int64), ends - lengths, ends, np.zeros(len(ends), bool))
    pieces, part, origin = split_regions(whole, shares)
    covered = np.concatenate([np.arange(a, b) for a, b in zip(pieces.start, pieces.end, strict=True)])
    assert covered.tolist() == list(range(int(ends[-1])))
    for at, length in enumerate(lengths):
        sizes = [
            int(pieces.lengths[(origin == at) & (part == p)].sum()) for p in (TRAIN, VALIDATION, HELD_OUT)
        ]
        assert sizes[1:] == [int(length * shares[0]), int(length * shares[1])] and sum(sizes) == length


def stretches_of(rows: list[tuple[int, int, int]]) -> Stretches:
    store, start, end = np.array(rows).T
    return Stretches(store, start, end, np.zeros(len(rows), bool))


def test_overlap_is_found_across_files_and_strands_and_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "a.fa").write_text(">one\nAACCGGTTACGTTGCA\n>two\nGATTACAGATTACA\n")
    (tmp_path / "b.fa").write_text(">other\nTGCAACGTAACCGGTT\n")  # record one on the other strand
    stores = [open_fasta(tmp_path / name, tmp_path / "cache") for name in ("a.fa", "b.fa")]
    contents = contents_of(stores, stretches_of([(0, 0, 3), (0, 16, 20), (1, 0, 16)]))
    assert contents[0] == contents[2] != contents[1]
    sides = np.array([TRAIN, HELD_OUT])
    check_apart(stores, stretches_of([(0, 0, 10), (0, 10, 16)]), sides)
    check_apart(stores, stretches_of([(0, 0, 10), (1, 0, 6)]), sides)  # letters 0..6 of b are 10..16 of a
    check_apart(stores, stretches_of([(0, 0, 10), (0, 16, 30)]), sides)
    check_apart(stores, stretches_of([(0, 0, 10), (0, 5, 16)]), np.array([TRAIN, TRAIN]))
    for clash in (
        [(0, 0, 10), (0, 9, 16)],
        [(0, 0, 10), (1, 0, 7)],
        [(0, 0, 16), (0, 3, 5)],
        [(0, 3, 5), (0, 0, 16)],
    ):
        with pytest.raises(UserError, match="overlap") as refusal:
            check_apart(stores, stretches_of(clash), sides)
        assert "(train)" in str(refusal.value) and "(held_out)" in str(refusal.value)


@given(
    st.lists(
        st.tuples(st.integers(0, 29), st.integers(1, 12), st.integers(0, 2)).map(
            lambda drawn: (drawn[0], min(drawn[0] + drawn[1], 30), drawn[2])
        ),
        min_size=1,
        max_size=12,
    )
)
def test_overlap_equals_that_of_plain_sets(rows: list[tuple[int, int, int]]) -> None:
    class OneRecord:
        starts, flipped = np.array([0, 30]), np.array([False])
        content = np.zeros((1, 16), np.uint8)
        num_records, names, source = 1, ["a"], "a.fa"

        def record_at(self, position: int) -> int:
            return 0

    sides = [{at for start, end, part in rows if part == p for at in range(start, end)} for p in range(3)]
    clash = any(sides[a] & sides[b] for a in range(3) for b in range(a))
    stretches = stretches_of([(0, start, end) for start, end, _ in rows])
    part_of = np.array([part for _, _, part in rows])
    if clash:
        with pytest.raises(UserError, match="overlap"):
            check_apart([OneRecord()], stretches, part_of)  # type: ignore[list-item]
    else:
        check_apart([OneRecord()], stretches, part_of)  # type: ignore[list-item]
