"""OMP_NUM_THREADS: the threads that torch starts with, where it says a number that can be."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = "OMP_NUM_THREADS"
_SHOWN = 40
_LIST = re.compile(r"\s*\+?[0-9]+\s*(,\s*\+?[0-9]+\s*)*")  # for regions within regions; the first one counts
_LARGEST = 2**31 - 1  # an int of C: OpenMP keeps the lowest 32 bits of what is larger
_UNREADABLE = 2**64 - 1  # an unsigned long of C: with one number from here on, it ignores the whole list


def told_threads(environment: Mapping[str, str]) -> int | None:
    """The number that the variable says, from 1 to that of an int; None where it says none."""
    told = environment.get(_NAME, "")
    if not _LIST.fullmatch(told):
        return None
    numbers = [_number(each) for each in told.split(",")]
    usable = min(numbers) > 0 and max(numbers) < _UNREADABLE and numbers[0] <= _LARGEST
    return numbers[0] if usable else None


def flaw_of_told_threads(environment: Mapping[str, str]) -> str | None:
    """Why the variable is ignored though it is set; None where it is not."""
    told = environment.get(_NAME, "")
    if not told or told_threads(environment) is not None:
        return None
    shown = told if len(told) <= _SHOWN else f"{told[:_SHOWN]}..."
    numbers = [_number(each) for each in told.split(",")] if _LIST.fullmatch(told) else [0]
    cut = min(numbers) > 0 and max(numbers) < _UNREADABLE
    does = "OpenMP keeps 32 bits of it" if cut else "it is ignored, and torch starts one thread for each core"
    return (
        f"{_NAME} = {shown!r}: must be a whole number from 1 to {_LARGEST}; {does}; "
        "set it to a number, or run.threads in the recipe"
    )


def _number(text: str) -> int:
    """The number, or one as unreadable: Python reads no more than thousands of digits."""
    digits = text.strip().lstrip("+").lstrip("0")
    return int(digits or 0) if len(digits) <= 20 else _UNREADABLE
