"""The length figure: the longest document that can be trained on under a memory cap, ours and transformers'.

    longstrand bench length [--cap 4GiB] [--side ours|transformers|both] [settings of our side]

A length fits when forward and backward really ran to their end in a process of its own, which is killed as soon as its
anonymous resident memory exceeds the cap. The first length to try comes from the bytes per token of two short ones.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longstrand.bench._arguments import parsed_length, require_transformers
from longstrand.bench._results import publish
from longstrand.bench._trial import Side, Trial, parser, run_apart, trial_from
from longstrand.bench.figures import show
from longstrand.bench.step import fastest_experts

CAP = 4 * 2**30
ASKED = 64.0
TOLERANCE = 0.05
SHORT: dict[Side, tuple[int, int]] = {"ours": (32_768, 131_072), "transformers": (2048, 4096)}
MULTIPLE: dict[Side, int] = {"ours": 4096, "transformers": 512}
MARGIN = 0.98  # of the cap: a first guess that fits saves a long trial
LIMIT_SECONDS = 3600.0
MOST = 2**20  # of the figure: what fits beyond it takes ours a quarter of an hour and more per trial
COLUMNS = ("side", "longest", "shortest that does not fit", "peak MiB", "trials")


@dataclass
class Search:
    """The longest length that fits, and how it was found.

    Args:
        longest: a length that ran to its end; 0: none did.
        too_long: the shortest one that did not; None: growth was stopped at `most`.
        tried: every trial in order.
    """

    longest: int = 0
    too_long: int | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)

    @property
    def found(self) -> dict[str, Any]:
        """What was measured at the longest length."""
        return next(one for one in self.tried if one["tokens"] == self.longest and one["ended"] is None)


def search(
    run: Callable[[int], dict[str, Any]],
    first: int,
    *,
    multiple: int,
    growth: float = 2.0,
    tolerance: float = TOLERANCE,
    most: int | None = None,
) -> Search:
    """Grows from `first` until a length does not fit (or shrinks until one does), then halves the gap between the two.

    Args:
        run: one trial; it fits when `ended` is None.
        first: where to begin; the better the guess, the fewer trials.
        multiple: lengths are multiples of this.
        growth: factor from one length to the next while all fit; its square, while none does.
        tolerance: ends when the gap is at most this part of what fits, or one multiple.
        most: no length beyond this is tried.
    """
    found = Search()
    length: int | None = max(multiple, first // multiple * multiple)
    while length is not None:
        length = length if most is None else min(length, most)
        one = run(length)
        found.tried.append(one)
        if one["ended"] is None:
            found.longest = length
        else:
            found.too_long = length
        done = most is not None and found.longest >= most
        length = None if done else _next(found, multiple, growth, tolerance)
    return found


def _next(found: Search, multiple: int, growth: float, tolerance: float) -> int | None:
    """The next length to try; None when the gap is closed."""
    longest, too_long = found.longest, found.too_long
    if too_long is None:
        return max(int(longest * growth) // multiple, longest // multiple + 1) * multiple
    if too_long - longest <= max(multiple, tolerance * longest):
        return None
    if longest == 0:
        return max(int(too_long / growth**2) // multiple, 1) * multiple
    middle = (longest + too_long) // 2 // multiple * multiple
    return middle if middle > longest else None


def extrapolated(short: Sequence[dict[str, Any]], cap_bytes: int) -> int:
    """The length at which two measured peaks, drawn as a line, meet the cap."""
    first, second = ((one["tokens"], one["watched_peak_bytes"]) for one in short)
    slope = max((second[1] - first[1]) / (second[0] - first[0]), 1.0)
    return int((cap_bytes - first[1]) / slope) + first[0]


def longest(trial: Trial, cap_bytes: int, limit_seconds: float, most: int | None = None) -> Search:
    """Searches one side; the step is taken once per trial."""
    known: dict[int, dict[str, Any]] = {}

    def run(length: int) -> dict[str, Any]:
        if length not in known:
            known[length] = run_apart(replace(trial, tokens=length, steps=1), cap_bytes, limit_seconds)
        return known[length]

    short = [run(length) for length in SHORT[trial.side] if most is None or length <= most]
    if len(short) < 2 or any(one["ended"] for one in short):  # no line to follow: from one multiple on
        guess, growth = MULTIPLE[trial.side], 2.0
    else:
        guess = first_guess(run, short, int(MARGIN * cap_bytes), MULTIPLE[trial.side], most)
        # A line is straight for ours; transformers has terms in the length's square, so its guess is too long.
        growth = 1 + TOLERANCE if trial.side == "ours" else 1.5
    found = search(run, guess, multiple=MULTIPLE[trial.side], growth=growth, most=most)
    found.tried = list(known.values())
    return found


def first_guess(
    run: Callable[[int], dict[str, Any]],
    short: Sequence[dict[str, Any]],
    cap_bytes: int,
    multiple: int,
    most: int | None,
) -> int:
    """Where a line through the last two measured peaks meets the cap; drawn anew while it is far beyond them."""
    measured = list(short)
    while True:
        guess = extrapolated(measured[-2:], cap_bytes) // multiple * multiple
        guess = max(multiple, guess if most is None else min(guess, most))
        if guess <= (1 + TOLERANCE) * measured[-1]["tokens"]:
            return guess
        one = run(guess)
        if one["ended"]:
            return guess
        measured.append(one)


def compare(
    ours: Trial, sides: Sequence[Side], cap_bytes: int, limit_seconds: float, most: int | None
) -> dict[Side, Search]:
    """The search of each side, by side."""
    every: dict[Side, Search] = {}
    for side in sides:
        trial = ours
        if side == "transformers":
            experts, _ = fastest_experts(ours)
            trial = Trial(0, side, ours.config, ours.dtype, ours.threads, experts=experts)
        every[side] = longest(trial, cap_bytes, limit_seconds, most)
    return every


def measure() -> list[dict[str, Any]]:
    """Both sides under 4 GiB, the toy in float32; ours with disk offload, and stopped at a million tokens."""
    ours = Trial(0, offload="disk")
    every = compare(ours, ("ours", "transformers"), CAP, LIMIT_SECONDS, MOST)
    return [_record(every, ours, CAP)]


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench length`."""
    options_of = parser("length", __doc__)
    options_of.add_argument("--cap", type=parse_bytes, default=CAP, help="such as 4GiB or 900MiB")
    options_of.add_argument("--side", choices=("ours", "transformers", "both"), default="both")
    options_of.add_argument("--most", type=parsed_length, help="try no length beyond this")
    options_of.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of one trial")
    options = options_of.parse_args(list(arguments))
    if options.side != "ours":
        require_transformers("length", ", or search ours alone with --side ours")
    ours = trial_from(options)
    sides: tuple[Side, ...] = ("ours", "transformers") if options.side == "both" else (options.side,)
    every = compare(ours, sides, options.cap, options.limit, options.most)
    facts = {
        "cap_bytes": options.cap,
        "settings": ours.settings(),
        "tried": {s: f.tried for s, f in every.items()},
    }
    publish("length", table(every), facts)
    return show(_record(every, ours, options.cap)) if len(every) == 2 else 0


def parse_bytes(text: str) -> int:
    """Bytes of "4GiB", "900 MiB" or a plain number.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    found = re.fullmatch(r"([\d.]+)\s*(|[KMGT]iB)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of bytes, such as 4GiB")
    return int(float(found[1]) * 1024 ** ("KMGT".find(found[2][:1]) + 1 if found[2] else 0))


def table(every: dict[Side, Search]) -> dict[str, Any]:
    """One row per side."""
    rows = []
    for side, one in every.items():
        too_long = "none tried" if one.too_long is None else f"{one.too_long:,}"
        peak = one.found["watched_peak_bytes"] / 2**20 if one.longest else 0.0
        rows.append([side, f"{one.longest:,}", too_long, f"{peak:,.0f}", str(len(one.tried))])
    return {"columns": list(COLUMNS), "rows": rows}


def _record(every: dict[Side, Search], ours: Trial, cap_bytes: int) -> dict[str, Any]:
    longest = {side: found.longest for side, found in every.items()}
    ratio = (
        longest["ours"] / longest["transformers"] if longest["transformers"] else 0.0
    )  # not found: no multiple
    stopped = [one["tokens"] for found in every.values() for one in found.tried if one["ended"] == "time"]
    return {
        "name": f"longest sequence under {cap_bytes / 2**30:g} GiB, multiple of transformers",
        "asked": ASKED,
        "measured": ratio,
        "pass": ratio >= ASKED and not [t for t in stopped if t <= (every["transformers"].too_long or 0)],
        "detail": {
            "longest": longest,
            "shortest that does not fit": {side: found.too_long for side, found in every.items()},
            "ended by the time limit, not by memory": stopped,
            "settings of ours": ours.settings(),
            "tried": {side: found.tried for side, found in every.items()},
            "table": table(every),
        },
    }
