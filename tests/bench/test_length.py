"""The search for the longest length that fits: its logic with a pretended trial, its ending with a real process."""

import argparse
import sys

import pytest

from longstrand.bench._trial import watch
from longstrand.bench.length import extrapolated, first_guess, parse_bytes, search


def pretended(limit):
    asked = []

    def run(length):
        asked.append(length)
        return {"tokens": length, "ended": None if length <= limit else "cap", "watched_peak_bytes": 0}

    return run, asked


@pytest.mark.parametrize("limit", [512, 700, 5000, 9999, 131_072, 1_000_003])
@pytest.mark.parametrize("first", [1, 4096, 900_000])
@pytest.mark.parametrize("growth", [2.0, 1.15])
def test_what_is_found_ran_and_what_is_longer_by_a_twentieth_did_not(limit, first, growth):
    run, asked = pretended(limit)
    found = search(run, first, multiple=512, growth=growth)
    assert found.longest in asked and found.too_long in asked
    assert found.longest <= limit < found.too_long
    assert found.too_long - found.longest <= max(512, 0.05 * found.longest)
    assert all(length % 512 == 0 for length in asked) and len(set(asked)) == len(asked)


def test_a_good_guess_takes_two_trials():
    run, asked = pretended(1_000_000)
    found = search(run, 980_000, multiple=4096, growth=1.05)
    assert len(asked) == 2 and found.longest == 978_944


def test_where_nothing_fits_the_longest_is_0():
    run, asked = pretended(100)
    found = search(run, 4096, multiple=512)
    assert (found.longest, found.too_long) == (0, 512) and asked[-1] == 512


def test_no_length_beyond_the_most_is_tried():
    run, asked = pretended(10**9)
    found = search(run, 4096, multiple=512, most=20_480)
    assert (found.longest, found.too_long, max(asked)) == (20_480, None, 20_480)


def test_two_peaks_on_a_line_meet_the_cap():
    short = [{"tokens": t, "watched_peak_bytes": 1000 + 7 * t} for t in (100, 300)]
    assert extrapolated(short, 1000 + 7 * 5000) == 5000


def test_the_guess_is_made_again_from_the_longest_that_ran():
    """Peaks that bend at 32: the first line meets the cap at 72, the second one, half as steep, at 112."""
    asked = []

    def run(length):
        asked.append(length)
        return {"tokens": length, "watched_peak_bytes": 60_000 + (length - 32) * 500, "ended": None}

    short = [{"tokens": t, "watched_peak_bytes": peak} for t, peak in ((12, 40_000), (32, 60_000))]
    assert first_guess(run, short, 100_000, 4, None) == 112
    assert asked == [72, 112]
    assert first_guess(run, short, 100_000, 4, 60) == 60


@pytest.mark.parametrize(
    ("text", "value"), [("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("2048", 2048), ("3KiB", 3072)]
)
def test_caps_are_read_in_binary_units(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["4GB", "", "much", "-1GiB"])
def test_a_cap_without_a_meaning_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_bytes(text)


HOLD = "import time; held = bytearray(b'1') * (%d << 20); time.sleep(%g)"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_exceeds_the_cap_is_killed_and_one_below_it_is_not():
    ended, peak = watch([sys.executable, "-c", HOLD % (200, 60)], {}, cap_bytes=100 << 20)
    assert ended == "cap" and peak > 100 << 20
    ended, peak = watch([sys.executable, "-c", HOLD % (50, 0.2)], {}, cap_bytes=100 << 20)
    assert ended is None and 50 << 20 <= peak <= 100 << 20


def test_a_process_that_takes_too_long_is_killed():
    ended, _ = watch([sys.executable, "-c", HOLD % (1, 60)], {}, limit_seconds=0.3)
    assert ended == "time"
