"""What all ranks must know of each other beside tensors: that one failed, and what the first one found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from longstrand.errors import LongstrandError
from longstrand.parallel.axis import Axis

T = TypeVar("T")


@contextmanager
def together(world: Axis) -> Iterator[None]:
    """An error inside on one rank is one on all of them, once all have come to the end.

    Inside, a rank that can fail alone waits for no other. Alone, nothing is done.

    Raises:
        LongstrandError: that of the first rank that raised one, with its own words.
        OSError, RuntimeError: its own on the rank where it arose, a RuntimeError with its words on the others.
    """
    if world.group is None:
        yield
        return
    mine: Exception | None = None
    try:
        yield
    except (LongstrandError, OSError, RuntimeError) as error:
        mine = error
    sent = mine if mine is None or isinstance(mine, LongstrandError) else _words(mine)
    failed = [(rank, each) for rank, each in enumerate(_gather(world, sent)) if each is not None]
    if mine is not None and not isinstance(mine, LongstrandError):
        raise mine
    for rank, each in failed:
        raise each if isinstance(each, LongstrandError) else RuntimeError(f"rank {rank}: {each}")


def on_first(world: Axis, do: Callable[[], T]) -> T:
    """What `do` returns on the first rank, which alone calls it; its error is one on all."""
    if world.group is None:
        return do()
    done: T | None = None
    with together(world):
        if world.rank == 0:
            done = do()
    return _gather(world, done)[0]


def _gather(world: Axis, value: Any) -> list[Any]:
    held: list[Any] = [None] * world.size
    dist.all_gather_object(held, value, group=world.group)
    return held


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
