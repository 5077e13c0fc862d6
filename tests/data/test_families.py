"""Families against plain Python sets of k-mers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstrand.data import families
from longstrand.data.families import find_families, kmers
from longstrand.errors import UserError

SWAP = str.maketrans("ACGT", "TGCA")


def turned(text: str) -> str:
    return text.translate(SWAP)[::-1]


def kmer_set(text: str, k: int) -> set[str]:
    """The oracle: k-mers of both strands that hold only A, C, G, T."""
    text = text.upper().replace("U", "T")
    found = {text[i : i + k] for i in range(len(text) - k + 1)}
    found = {kmer for kmer in found if set(kmer) <= set("ACGT")}
    return found | {turned(kmer) for kmer in found}


def components(records: list[str], k: int) -> list[int]:
    """The oracle: the smallest record of each record's component, joined pair by pair."""
    label = list(range(len(records)))
    sets = [kmer_set(record, k) for record in records]
    for a, b in combinations(range(len(records)), 2):
        if sets[a] & sets[b] or records[a].upper() == records[b].upper() or records[a] == turned(records[b]):
            old, new = max(label[a], label[b]), min(label[a], label[b])
            label = [new if at == old else at for at in label]
    return label


def letters(*records: str) -> list[np.ndarray]:
    return [np.frombuffer(record.encode(), np.uint8) for record in records]


def drawn(rng: np.random.Generator, n: int) -> str:
    return "".join(rng.choice(list("ACGT"), n))


@settings(max_examples=100, deadline=None)
@given(
    records=st.lists(st.text("ACGTNacgt", max_size=14), min_size=1, max_size=12),
    k=st.sampled_from([3, 5, 7]),
    passes=st.sampled_from([1, 3]),
    batch=st.sampled_from([8, 1 << 20]),
)
def test_components_equal_those_of_plain_sets(records: list[str], k: int, passes: int, batch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "_PASS_KMERS", -(-sum(map(len, records)) // passes) or 1)
        patch.setattr(families, "_BATCH_LETTERS", batch)
        found = find_families(letters(*records), k).label
    label = components([record.upper() for record in records], k)
    names = {first: name for name, first in enumerate(dict.fromkeys(label))}
    assert found.tolist() == [names[first] for first in label]


def test_a_kmer_is_read_like_a_number_in_base_four() -> None:
    rng = np.random.default_rng(5)
    text = drawn(rng, 77)
    codes = np.array(["ACGT".index(letter) for letter in text], np.uint8)
    for k in (1, 2, 3, 8, 21, 31):
        forward, backward = kmers(codes, k)

        def number(word: str) -> int:
            return sum("ACGT".index(letter) * 4**place for place, letter in enumerate(reversed(word)))

        words = [text[i : i + k] for i in range(len(text) - k + 1)]
        assert forward.tolist() == [number(word) for word in words]
        assert backward.tolist() == [number(turned(word)) for word in words]


def test_thirty_one_shared_letters_make_relatives_and_thirty_do_not() -> None:
    rng = np.random.default_rng(0)
    core = drawn(rng, 31)
    a = drawn(rng, 50) + "A" + core + "A" + drawn(rng, 20)
    b = drawn(rng, 9) + "C" + core + "C" + drawn(rng, 33)
    c = drawn(rng, 9) + "G" + core[:30] + "N" + drawn(rng, 33)
    d = "TT" + turned(core).lower().replace("t", "u") + "TT"
    assert find_families(letters(a, b, c, d)).label.tolist() == [0, 0, 1, 0]


def test_relatives_on_the_other_strand_are_marked_to_be_turned() -> None:
    rng = np.random.default_rng(1)
    first, second = drawn(rng, 200), drawn(rng, 100)
    records = [second, first, first[50:150], turned(first[20:120]), turned(second)]
    found = find_families(letters(*records))
    assert found.label.tolist() == [0, 1, 1, 1, 0]
    assert found.turned.tolist() == [False, False, False, True, True]
    assert found.contradicted == 0


def test_a_family_whose_strands_contradict_each_other_stays_as_it_stands() -> None:
    rng = np.random.default_rng(2)
    a, b, c = drawn(rng, 60), drawn(rng, 60), drawn(rng, 60)
    records = [a + b, b + c, c + turned(a)]
    found = find_families(letters(*records))
    assert found.label.tolist() == [0, 0, 0] and not found.turned.any() and found.contradicted == 1


def test_no_record_and_an_even_k() -> None:
    assert len(find_families([]).label) == 0
    with pytest.raises(UserError, match="kmer = 30"):
        find_families(letters("ACGT"), 30)
