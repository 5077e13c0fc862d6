"""What every rank does, however it was started: make the mesh, then train."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from longstrand.config import Recipe
from longstrand.errors import RunFailed, UserError
from longstrand.parallel import Axis, make_mesh, said_once
from longstrand.train.run_folder import Started
from longstrand.train.sft import train

_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_SILENT = ("Timed out waiting", "Socket Timeout", "Wait timeout")


OUT_OF_MEMORY = (
    "if no one ended it, the system was out of memory (dmesg names the process): free some, or put fewer ranks on this "
    "machine"
)
"""What to do about a rank that SIGKILL ended; a resumed run may have other ranks, but no other tile."""


class RankLost(RunFailed):
    """Another rank is gone or does not answer: what is wrong with it is not known here."""


def train_as_rank(recipe: Recipe, world: Axis, *, resume: bool, started: Started = Started()) -> Path:
    """Trains as one of the ranks that torch.distributed knows; returns the run's folder.

    Raises:
        LongstrandError: what ends the run, on every rank.
        RankLost: another rank has ended without that, or stands still.
    """
    sizes = recipe.parallel
    with others_needed(world):
        with said_once(world, UserError):  # sizes that do not fit; no rank has waited for another then
            mesh = make_mesh(data=sizes.data, context=sizes.context, expert=sizes.expert)
        return train(recipe, resume=resume, mesh=mesh, started=started)


def backend() -> str:
    """Gloo for tensors in host memory, NCCL for those on a GPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


@contextmanager
def others_needed(world: Axis, then: str = "go on with --resume") -> Iterator[None]:
    """One line, not a traceback, where an exchange fails for want of another rank: it is not where the fault is.

    Args:
        then: what to do once that is known.
    """
    try:
        yield
    except RuntimeError as error:
        here = f"rank {world.rank} of {world.size} on {socket.gethostname()}"
        if any(words in str(error) for words in _GONE):
            raise RankLost(
                f"{here}: another rank ended in the middle of an exchange; look for what that one said, and {then}"
            ) from error
        if any(words in str(error) for words in _SILENT):
            raise RankLost(
                f"{here}: another rank did not answer in time ({str(error).splitlines()[0]}); look for the one that "
                f"stands still, and {then}"
            ) from error
        raise
