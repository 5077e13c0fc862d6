"""Regions and BED lines against slices of plain strings, and every kind of bad line."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyfaidx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstrand.data.ingest import open_fasta
from longstrand.data.regions import Region, locate, read_bed, read_regions
from longstrand.data.store import Store
from longstrand.errors import UserError

CHR1, CHR2, ODD = "ACGTACGTAC", "TTTTGGGG", "CCCCC"


@pytest.fixture
def stores(tmp_path: Path) -> list[Store]:
    first, second = tmp_path / "one.fa", tmp_path / "two.fa"
    first.write_text(f">chr1 x\n{CHR1}\n>HLA:A:1\n{ODD}\n>twice\nAAA\n")
    second.write_text(f">chr2\n{CHR2}\n>twice\nGGG\n")
    return [open_fasta(path, tmp_path / "cache") for path in (first, second)]


def letters(regions: list[Region], stores: list[Store]) -> list[str]:
    stretches, _ = locate(regions, stores)
    return [
        stores[store].values[start:end].tobytes().decode()
        for store, start, end in zip(stretches.store, stretches.start, stretches.end, strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chr1", CHR1),
        ("chr1:1-4", CHR1[:4]),
        ("chr1:3-3", CHR1[2:3]),
        ("chr1:8", CHR1[7:]),
        ("chr1:8-", CHR1[7:]),
        ("chr2:1-8", CHR2),
        ("chr1:1-1,0", CHR1),
        ("HLA:A:1", ODD),
        ("HLA:A:1:2-3", ODD[1:3]),
    ],
)
def test_a_region_counts_from_one_and_includes_its_end(stores: list[Store], text: str, expected: str) -> None:
    assert letters(read_regions([text], stores), stores) == [expected]


def test_a_bed_line_counts_from_zero_and_excludes_its_end(stores: list[Store], tmp_path: Path) -> None:
    text = "track name=x\n# note\nbrowser hide\n\nchr2\t0\t4\tname\t0\t-\nchr1 2 5\r\nchr1\t5\t7"
    for data in (text.encode(), gzip.compress(text.encode()), b"\xef\xbb\xbf" + text.encode()):
        path = tmp_path / "x.bed"
        path.write_bytes(data)
        assert letters(read_bed(path), stores) == [CHR1[2:5], CHR1[5:7], CHR2[:4]]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["chr1", "chr2"]), st.integers(0, 7), st.integers(1, 8)).filter(
            lambda region: region[1] < region[2]
        ),
        min_size=1,
        max_size=8,
    )
)
def test_overlapping_regions_become_one_and_no_letter_is_chosen_twice(
    spans: list[tuple[str, int, int]],
) -> None:
    names, starts, nothing = ["chr1", "chr2"], np.array([0, 10, 18]), np.empty(0)
    store = Store(Path("x"), "d", np.zeros(18), None, starts, np.ones(2), names, nothing, nothing, {})
    stretches, twice = locate([Region(name, start, end, "") for name, start, end in spans], [store])
    offset = {"chr1": 0, "chr2": 10}
    wanted = {offset[name] + at for name, start, end in spans for at in range(start, end)}
    found = [
        at for start, end in zip(stretches.start, stretches.end, strict=True) for at in range(start, end)
    ]
    assert sorted(found) == sorted(wanted) == found
    assert twice == sum(end - start for _, start, end in spans) - len(wanted)


def test_regions_of_a_large_record_equal_those_of_pyfaidx(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("ACGTNacgt"), 5003))
    path = tmp_path / "x.fa"
    path.write_text(">chr1\nACGT\n>chr2\n" + "\n".join(text[i : i + 61] for i in range(0, 5003, 61)) + "\n")
    oracle = pyfaidx.Fasta(str(path))
    store = open_fasta(path, tmp_path / "cache")
    for start, end in ((1, 5003), (1, 1), (5003, 5003), (61, 62), (1000, 4321)):
        region = read_regions([f"chr2:{start}-{end}"], [store])
        assert letters(region, [store]) == [oracle.get_seq("chr2", start, end).seq]


BAD_REGIONS = {
    "unknown record": ("chr9", "no record is named 'chr9'"),
    "two records of one name": ("twice", "one.fa:5 and"),
    "past the end": ("chr1:5-11", "has 10 letters"),
    "starts past the end": ("chr1:11", "has 10 letters"),
    "starts at zero": ("chr1:0-5", "start at 1"),
    "reversed": ("chr1:5-4", "start at 1"),
    "no numbers": ("chr1:a-b", "not a span"),
    "negative": ("chr1:-5-4", "not a span"),
    "three numbers": ("chr1:1-2-3", "not a span"),
    "a number of 5,000 digits": ("chr1:" + "9" * 5000, "not a span"),
}


@pytest.mark.parametrize("kind", BAD_REGIONS)
def test_a_bad_region_is_named(stores: list[Store], kind: str) -> None:
    text, said = BAD_REGIONS[kind]
    with pytest.raises(UserError) as refusal:
        locate(read_regions([text], stores), stores)
    assert said in str(refusal.value) and text.split(":")[0] in str(refusal.value)


BAD_BED = {
    "two columns": (b"chr1\t5\n", ":1: 2 columns"),
    "one column": (b"chr1\t0\t5\nchr1\n", ":2: 1 columns"),
    "a start that is no number": (b"chr1\tx\t5\n", ":1: 'x'"),
    "a fraction": (b"chr1\t0\t5.5\n", ":1: '5.5'"),
    "a negative start": (b"chr1\t-1\t5\n", ":1: '-1'"),
    "a number of 5,000 digits": (b"chr1\t0\t" + b"9" * 5000, ":1: '9999"),
    "thousands separators": (b"chr1\t0\t1,000\n", ":1: '1,000'"),
    "an empty interval": (b"\n\nchr1\t5\t5\n", ":3: start 5"),
    "a reversed interval": (b"chr1\t5\t4\n", ":1: start 5"),
    "an unknown record": (b"chr1\t0\t5\nchrX\t0\t5\n", ":2: no record"),
    "an end past the record": (b"chr2\t0\t9\n", ":1: ends at 9"),
    "a name that two records have": (b"twice\t0\t3\n", ":1: 2 records"),
    "no interval": (b"# only a comment\n", "no interval"),
    "an empty file": (b"", "no interval"),
    "an empty first column": (b"\t0\t5\n", ":1: the first column"),
    "not UTF-8": (b"chr1\t0\t5\n\xff\xfe1\t0\t5\n", ":2: not UTF-8"),
    "a cut gzip": (gzip.compress(b"chr1\t0\t5\n" * 99)[:-9], "was cut"),
}


@pytest.mark.parametrize("kind", BAD_BED)
def test_a_bad_bed_file_is_one_line_with_its_place(stores: list[Store], tmp_path: Path, kind: str) -> None:
    data, said = BAD_BED[kind]
    path = tmp_path / "bad.bed"
    path.write_bytes(data)
    with pytest.raises(UserError) as refusal:
        locate(read_bed(path), stores)
    message = str(refusal.value)
    assert said in message and str(path) in message and "\n" not in message
