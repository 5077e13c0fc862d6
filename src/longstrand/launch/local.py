"""`--workers N`: ranks as processes of this machine, which meet in a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from longstrand.config import Recipe
from longstrand.errors import RunFailed
from longstrand.launch.ranks import OUT_OF_MEMORY, train_as_rank
from longstrand.parallel import Axis, run_ranks
from longstrand.parallel.processes import RankKilled
from longstrand.train.run_folder import Started
from longstrand.train.signals import SIGNALS, Stopped

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def train_on_this_machine(
    recipe: Recipe, workers: int, *, resume: bool, started: Started = Started()
) -> Path:
    """Trains with that many processes, which share the CPU threads of this one; returns the run's folder.

    SIGTERM and SIGINT go on to all of them: they finish the step, save, and end; the same signal again ends them at
    once. They end with this process, however it ends.

    Raises:
        Stopped: a signal came.
        RunFailed: a rank was killed, with what to do then, or failed with something else than the errors that `train`
            raises.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // workers))
    try:
        with _passed_on() as came:
            runs: list[Path] = run_ranks(workers, _train, recipe, resume, started)
    except (RunFailed, KeyboardInterrupt) as error:
        run = Path(recipe.run.out).expanduser().absolute()
        how = started.resume_command(run, workers)
        if came.number is None and isinstance(error, RankKilled):
            raise RunFailed(f"{error}; {_remedy(error.number, run, how)}") from error
        if came.number is None and isinstance(error, RunFailed):
            raise
        raise Stopped(came.number or signal.SIGINT, f"the ranks were ended; go on with {how}") from error
    finally:
        torch.set_num_threads(threads)
    return runs[0]


def _remedy(number: int, run: Path, how: str) -> str:
    """What to do about a rank that this signal killed."""
    begun = (run / "run.toml").exists()
    then = f"go on with {how}" if begun else "start it again"
    if number == signal.SIGKILL and begun:
        return f"{OUT_OF_MEMORY}, and {then}; a lower memory.tile needs a new run.out"
    if number == signal.SIGKILL:
        return f"{OUT_OF_MEMORY} or lower memory.tile, and {then}"
    if number in _CRASHES:
        return f"compiled code crashed: {then}, and if it happens again, with --set kernels.cpu=portable too"
    return then


def _train(recipe: Recipe, resume: bool, started: Started) -> Path:
    os.setpgid(0, 0)  # Ctrl-C in a terminal reaches the one who waits, and through it each rank, once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return train_as_rank(recipe, Axis("world", dist.group.WORLD), resume=resume, started=started)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass
class _Came:
    number: int | None = None


@contextmanager
def _passed_on() -> Iterator[_Came]:
    """Hands the first SIGTERM or SIGINT to the ranks and goes on waiting for them; the second acts here."""
    came = _Came()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before: dict[int, Any] = {}

    def receive(number: int, frame: FrameType | None) -> None:
        came.number = number
        for each, handler in before.items():
            signal.signal(each, handler)
        for rank in multiprocessing.active_children():
            if rank.pid is not None:
                os.kill(rank.pid, number)

    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield came
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
