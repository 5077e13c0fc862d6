"""Where the time of a call goes, by part of the package."""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import longstrand

SOURCE = Path(longstrand.__file__).parent
PLAIN = "torch, not called from here"  # mostly the backward pass of plain torch operations

STEPS_UP = 8

Function = tuple[str, int, str]  # as cProfile names it: file, line, name


def profile(call: Callable[[], Any]) -> dict[str, float]:
    """Share of the time by part: an op's folder, or a file; largest first.

    Time inside torch counts for the code that called it. A backward pass written here is Python and counts for its
    file; what autograd does by itself stands apart. torch.profiler needs gigabytes for one step of 4,096 tokens.
    """
    profiler = cProfile.Profile()
    profiler.runcall(call)
    return shares(pstats.Stats(profiler).stats)  # type: ignore[attr-defined]


def shares(stats: dict[Function, tuple[int, int, float, float, dict[Function, Any]]]) -> dict[str, float]:
    """The table of cProfile, the time of foreign functions given to those of ours that called them."""
    seconds: dict[str, float] = defaultdict(float)
    for function, (_, _, own, _, callers) in stats.items():
        known = _stops(function)
        if known or not callers:
            seconds[known or PLAIN] += own
        for caller, (_, _, own_there, _) in callers.items() if not known else ():
            seconds[_owner(caller, stats)] += own_there
    total = sum(seconds.values()) or 1.0
    return {name: value / total for name, value in sorted(seconds.items(), key=lambda item: -item[1])}


def part(file: str) -> str | None:
    """The part of the package that a file belongs to; None for files that are not ours, or that call a kernel."""
    if not file.startswith(str(SOURCE)) or file.startswith(str(SOURCE / "ops/native")):
        return None
    return "/".join(Path(file).relative_to(SOURCE).parts[:2])


def _stops(function: Function) -> str | None:
    return part(function[0]) or (PLAIN if "run_backward" in function[2] else None)


def _owner(function: Function, stats: dict[Function, Any]) -> str:
    """The part that a foreign function was called from, through others of torch."""
    for _ in range(STEPS_UP):
        known = _stops(function)
        callers = stats[function][4] if function in stats else {}
        if known or not callers:
            return known or PLAIN
        function = max(callers, key=lambda caller: callers[caller][3])
    return PLAIN
