"""Ranks as processes of this machine that meet in a file: no port, so that two jobs never meet each other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from longstrand.errors import LongstrandError, RunFailed
from longstrand.rank_process import leave

MEETING_SECONDS = 3600
"""How long a rank waits for another in an exchange before it fails: longer than a pass, or writing a checkpoint, takes.

One that died is noticed at once."""

_GRACE_SECONDS = 5.0


class RankKilled(RunFailed):
    """A signal ended a rank, which had no time to say why; the others were ended.

    Attributes:
        number: of the signal.
    """

    def __init__(self, message: str, number: int = signal.SIGKILL) -> None:
        super().__init__(message)
        self.number = number


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    start: Literal["spawn", "fork"] = "spawn",
    timeout: float | int | None = None,
) -> list[Any]:
    """What `function(*args)` returns on each of `num_ranks` processes joined by gloo, in rank order.

    Each process has the threads that this one has, and `torch.distributed` knows all of them. When one fails, or is
    killed, the others are ended: none stays behind.

    Args:
        function: importable by name, with arguments and result that torch can save.
        start: how processes begin; "fork" is quicker, and for a process without threads of its own.
        timeout: seconds until all must have ended; None: as long as they take.

    Raises:
        LongstrandError: the first one that a rank raised, of its own class.
        RankKilled: a signal ended a rank.
        RunFailed: a rank raised something else (with its traceback), or the time was up.
    """
    process = multiprocessing.get_context(start).Process  # type: ignore[attr-defined]
    target = _spawned if start == "spawn" else _rank
    with tempfile.TemporaryDirectory(prefix="longstrand-") as folder:
        threads = torch.get_num_threads()
        ranks = [
            process(target=target, args=(rank, num_ranks, folder, threads, function, args))
            for rank in range(num_ranks)
        ]
        try:
            for each in ranks:
                each.start()
            _wait(ranks, Path(folder), timeout)
        finally:
            _end(ranks)
        return [torch.load(Path(folder) / f"result_{rank}", weights_only=False) for rank in range(num_ranks)]


def _spawned(*arguments: Any) -> None:
    _rank(*arguments)
    leave(0)


def _rank(
    rank: int, num_ranks: int, folder: str, threads: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(threads)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=MEETING_SECONDS),
        )
        torch.save(function(*args), f"{folder}/result_{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - written down, whatever it is, for the one who waits
        # The rank whose error came first is the cause; others may fail because it is gone.
        failure = (time.time(), error if isinstance(error, LongstrandError) else None, traceback.format_exc())
        torch.save(failure, f"{folder}/writing_{rank}")
        os.rename(f"{folder}/writing_{rank}", f"{folder}/failed_{rank}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _wait(ranks: Sequence[BaseProcess], folder: Path, timeout: float | int | None) -> None:
    until = time.monotonic() + timeout if timeout is not None else None
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode not in (None, 0) for process in ranks):
            break
        if until is not None and time.monotonic() > until:
            waiting = [rank for rank, process in enumerate(ranks) if process.is_alive()]
            raise RunFailed(f"ranks {waiting} had not ended after {timeout:g} s")
        time.sleep(0.02)
    _raise_first(ranks, folder)


def _raise_first(ranks: Sequence[BaseProcess], folder: Path) -> None:
    if all(process.exitcode == 0 for process in ranks):
        return
    time.sleep(0.2)  # those that failed with it write why, too
    failures = {}
    for path in folder.glob("failed_*"):
        failures[int(path.name.removeprefix("failed_"))] = torch.load(path, weights_only=False)
    killed = {r: p.exitcode for r, p in enumerate(ranks) if p.exitcode and r not in failures}
    if killed:
        rank, code = next(iter(killed.items()))
        which = f"rank {rank} of {len(ranks)}"
        if code < 0:
            name = signal.Signals(-code).name
            raise RankKilled(f"{which} was killed by {name}; the others were ended", -code)
        raise RunFailed(f"{which} ended with code {code}; the others were ended")
    rank = min(failures, key=lambda number: failures[number][0])
    _, error, text = failures[rank]
    if error is not None:
        error.said_by_another = False  # by whichever rank was the first to write it down: here it is said
        raise error
    raise RunFailed(f"rank {rank} of {len(ranks)} failed:\n{text}")


def _end(ranks: Sequence[BaseProcess]) -> None:
    """No process outlives the call."""
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + _GRACE_SECONDS
    for process in started:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
