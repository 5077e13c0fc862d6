"""What ranks tell each other in plain values, and errors that end all of them in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from longstrand.errors import LongstrandError
from longstrand.parallel.axis import Axis

_Value = TypeVar("_Value")

_SHARED = (LongstrandError, OSError, RuntimeError)


def from_all(axis: Axis, value: _Value) -> list[_Value]:
    """The value of each rank, in rank order; it is pickled on the way."""
    if axis.group is None:
        return [value]
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


def from_first(axis: Axis, value: _Value) -> _Value:
    """The value of the first rank; what the others give is not looked at."""
    if axis.group is None:
        return value
    held: list[Any] = [value if axis.rank == 0 else None]
    dist.broadcast_object_list(held, group=axis.group, group_src=0)
    return held[0]


def by_first(axis: Axis, function: Callable[[], _Value]) -> _Value:
    """What the function returns on the first rank, which alone calls it, for every rank (pickled on the way).

    Raises:
        what `together` raises, of what the function does.
    """
    if axis.group is None:
        return function()
    value: _Value | None = None
    with together(axis):
        if axis.rank == 0:
            value = function()
    return from_first(axis, value)  # type: ignore[return-value]


@contextmanager
def together(axis: Axis) -> Iterator[None]:
    """An error inside on one rank is one on all, once all have come to the end: that of the lowest such rank.

    Inside, a rank that can fail alone waits for no other. An error of another kind passes through: its process ends,
    and whoever started the ranks ends the others.

    Raises:
        LongstrandError: on all ranks; marked as `said_by_another` on all but the one that met it first.
        OSError, RuntimeError: its own on the rank where it arose, a RuntimeError with its words on the others.
    """
    if axis.group is None:
        yield
        return
    mine: Exception | None = None
    try:
        yield
    except _SHARED as error:
        mine = error
    sent = mine if mine is None or isinstance(mine, LongstrandError) else _words(mine)
    failed = [(rank, each) for rank, each in enumerate(from_all(axis, sent)) if each is not None]
    if mine is not None and (not isinstance(mine, LongstrandError) or failed[0][0] == axis.rank):
        raise mine
    for rank, each in failed:
        if not isinstance(each, LongstrandError):
            raise RuntimeError(f"rank {rank}: {each}")
        each.said_by_another = True
        raise each


@contextmanager
def said_once(axis: Axis, kind: type[LongstrandError]) -> Iterator[None]:
    """For errors of a kind that every rank meets at the same place: the first rank shows them, the others do not.

    To be put around no more than that: an error that a rank above 0 meets alone would be shown by none.
    """
    try:
        yield
    except kind as error:
        error.said_by_another = axis.rank > 0
        raise


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
