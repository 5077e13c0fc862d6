"""What ranks tell each other in plain values, and errors that end all of them in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from longstrand.errors import LongstrandError
from longstrand.parallel.axis import Axis

_Value = TypeVar("_Value")


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
        LongstrandError: what the function refuses, on every rank; marked as `said_by_another` on all but the first.
    """
    if axis.group is None:
        return function()
    answer: Any = None
    if axis.rank == 0:
        try:
            answer = (function(), None)
        except LongstrandError as refused:
            from_first(axis, (None, refused))
            raise
    value, error = from_first(axis, answer)
    if error is not None:
        error.said_by_another = True
        raise error
    return value


@contextmanager
def together(axis: Axis) -> Iterator[None]:
    """What one rank refuses within it, all refuse: the lowest such rank's error is raised on every rank.

    Every rank must enter and leave it, and nothing within it may wait for another rank unless all do. An error that
    is not meant for users passes through: its process ends, and whoever started the ranks ends the others.

    Raises:
        LongstrandError: on all ranks; on all but the first that met it marked as `said_by_another`.
    """
    mine: LongstrandError | None = None
    try:
        yield
    except LongstrandError as error:
        if axis.group is None:
            raise
        mine = error
    if axis.group is None:
        return
    refusals = from_all(axis, mine)
    for rank, refusal in enumerate(refusals):
        if refusal is not None:
            if rank == axis.rank:
                assert mine is not None
                raise mine
            refusal.said_by_another = True
            raise refusal


@contextmanager
def said_once(axis: Axis, kind: type[LongstrandError]) -> Iterator[None]:
    """For errors of a kind that every rank meets at the same place: the first rank shows them, the others do not."""
    try:
        yield
    except kind as error:
        error.said_by_another = axis.rank > 0
        raise
