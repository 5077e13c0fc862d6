"""OMP_NUM_THREADS: the threads that torch starts with, where it says a number that can be."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = "OMP_NUM_THREADS"
_LIST = re.compile(r"\s*\+?[0-9]+\s*(,\s*\+?[0-9]+\s*)*")  # for regions within regions; the first one counts


def told_threads(environment: Mapping[str, str]) -> int | None:
    """The number that the variable says, from 1; None where it says none, so that torch takes one for each core."""
    told = environment.get(_NAME, "")
    if not _LIST.fullmatch(told):
        return None
    numbers = [int(each) for each in told.split(",")]
    return numbers[0] if min(numbers) > 0 else None


def flaw_of_told_threads(environment: Mapping[str, str]) -> str | None:
    """Why the variable is ignored though it is set; None where it is not."""
    told = environment.get(_NAME, "")
    if not told or told_threads(environment) is not None:
        return None
    return (
        f"{_NAME} = {told!r}: must be a whole number from 1; it is ignored, and torch starts one thread for each core; "
        "set it to a number, or run.threads in the recipe"
    )
