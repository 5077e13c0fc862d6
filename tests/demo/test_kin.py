"""Generated sequences: what they hold, and that a number always gives the same one."""

from __future__ import annotations

import numpy as np
import pytest

from longstrand.demo.kin import Kin, generate, mutate


def test_one_founder_without_mutations_is_a_tandem_repeat():
    letters, copied = generate(Kin(length=500, unit=(31, 31)), seed=3, number=7)
    assert len(letters) == 500 and set(letters.tobytes()) <= set(b"ACGT")
    assert (letters[31:] == letters[:-31]).all()
    assert not copied[:31].any() and copied[31:].all()


def test_a_sequence_does_not_depend_on_those_before_it():
    kin = Kin(length=300, unit=(20, 60), founders=(1, 4), substitutions=(0.0, 0.2), indels=0.01)
    letters, copied = generate(kin, seed=1, number=5)
    again, copied_again = generate(kin, seed=1, number=5)
    other, _ = generate(kin, seed=2, number=5)
    assert (letters == again).all() and (copied == copied_again).all()
    assert (letters != other).any()


def test_with_several_founders_a_copy_has_its_founder_somewhere_before():
    letters, copied = generate(Kin(length=2000, unit=(50, 50), founders=(6, 6)), seed=0, number=0)
    text = letters.tobytes()
    for start in range(0, 2000, 50):
        assert bool(copied[start]) == (text[start : start + 50] in text[:start])


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_substitutions_change_that_share_of_letters_and_never_to_the_same_letter(rate: float):
    founder = np.frombuffer(b"ACGT" * 5000, np.uint8)
    copy = mutate(founder, rate, 0.0, np.random.default_rng(0))
    assert len(copy) == len(founder)
    assert np.mean(copy != founder) == pytest.approx(rate, abs=4 * (rate / len(founder)) ** 0.5)


def test_indels_drop_and_add_letters_in_equal_number():
    founder = np.frombuffer(b"ACGT" * 25_000, np.uint8)
    copy = mutate(founder, 0.0, 0.01, np.random.default_rng(0))
    assert copy.tobytes() != founder.tobytes()
    assert abs(len(copy) - len(founder)) < 0.01 * len(founder)


def test_copies_cannot_be_told_from_founders_by_their_letters():
    letters, _ = generate(Kin(length=200_000, unit=(90, 110), founders=(300, 300)), seed=0, number=1)
    shares = np.bincount(letters, minlength=256)[list(b"ACGT")] / len(letters)
    assert shares == pytest.approx(np.full(4, 0.25), abs=0.02)
