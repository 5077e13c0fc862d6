"""The alphabet and its policies, letter by letter, against tables written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longstrand.data.letters import ALPHABET, LetterPolicy, reverse_complement

PAIRS = dict(zip("ACGTUNRYSWKMBDHV", "TGCAANYRSWMKVHDB", strict=True))
ODD = "RYSWKMBDHV"


def as_array(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def turned(text: str) -> str:
    """The oracle: letter by letter from the end, case kept."""
    found = [PAIRS[letter.upper()] for letter in reversed(text)]
    return "".join(
        new if old.isupper() else new.lower() for new, old in zip(found, reversed(text), strict=True)
    )


@given(st.text("ACGTNRYSWKMBDHVacgtnryswkmbdhv", max_size=50))
def test_the_other_strand_is_read_backwards_with_paired_letters(text: str) -> None:
    assert reverse_complement(as_array(text)).tobytes().decode() == turned(text)
    assert reverse_complement(reverse_complement(as_array(text))).tobytes().decode() == text


def test_rna_pairs_with_u() -> None:
    assert reverse_complement(as_array("AACGU")).tobytes() == b"ACGUU"
    assert reverse_complement(as_array("AACGUT")).tobytes() == b"AACGTT"


@pytest.mark.parametrize("iupac", ["n", "keep", "error"])
def test_every_accepted_letter_is_read_as_the_policy_says(iupac: str) -> None:
    table = LetterPolicy(iupac=iupac).normal()
    for letter in "ACGTUN":
        assert chr(table[ord(letter)]) == chr(table[ord(letter.lower())]) == letter
    for letter in ODD:
        expected = letter if iupac == "keep" else "N"
        assert chr(table[ord(letter)]) == chr(table[ord(letter.lower())]) == expected
    assert {chr(table[ord(sign)]) for sign in "X-.*?x"} == {"N"}
    assert np.count_nonzero(table) == 2 * len(ALPHABET) + 6


@pytest.mark.parametrize(
    ("policy", "text", "weights"),
    [
        (LetterPolicy(), "ACgtNnR-", [1, 1, 1, 1, 0, 0, 0, 0]),
        (LetterPolicy(n="keep"), "ACgtNnR-", [1] * 8),
        (LetterPolicy(case=0.25), "ACgtNnR-", [1, 1, 0.25, 0.25, 0, 0, 0, 0]),
        (LetterPolicy(iupac="keep"), "RyN", [1, 1, 0]),
        (LetterPolicy(case=0.5, n="keep"), "nN", [0.5, 1]),
    ],
)
def test_the_loss_weight_of_each_letter(policy: LetterPolicy, text: str, weights: list[float]) -> None:
    assert policy.weights()[as_array(text)].tolist() == weights
