"""`--ray`: ranks as workers of Ray Train, on this machine or on a cluster. The only file that imports Ray."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from longstrand.config import Recipe
from longstrand.console import shown
from longstrand.errors import LongstrandError, RunFailed, UserError
from longstrand.launch.ranks import OUT_OF_MEMORY, RankLost, train_as_rank
from longstrand.parallel import Axis
from longstrand.parallel.processes import MEETING_SECONDS
from longstrand.train.run_folder import Started
from longstrand.train.signals import Stopped

STARTS = 5
"""How often workers are started before that is an error; each time Ray waits a minute for them."""

_OBJECT_STORE_BYTES = 100 * 2**20  # only a recipe and lines of text pass through it
_POLL_SECONDS = 0.3
_ANSWER_SECONDS = 10
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
}


def train_through_ray(
    recipe: Recipe,
    workers: int,
    address: str,
    environment: MutableMapping[str, str],
    *,
    resume: bool,
    started: Started = Started(),
) -> Path:
    """Trains with that many Ray workers and returns the run's folder; what the first rank says is shown here.

    Args:
        address: "local" for a Ray of this run alone, without fixed ports, which ends with it; else that of a cluster,
            whose machines have the same files under the same paths.

    Raises:
        LongstrandError: what a rank raised.
        Stopped: SIGINT or SIGTERM came here; the workers were ended.
        RunFailed: a worker was killed, or failed in another way (with its traceback).
    """
    _require_ray(address, environment)
    import ray
    from ray.train import TrainingFailedError

    started = replace(started, ray=address)
    go_on = started.resume_command(Path(recipe.run.out).expanduser().absolute(), workers)
    # Twice, since Ray takes SIGTERM for itself when it starts.
    with _ended_by_signals(go_on), _session(address, workers) as folder, _ended_by_signals(go_on):
        desk: Any = ray.remote(num_cpus=0)(_Desk)
        desk = desk.remote()
        config = {
            "recipe": recipe,
            "resume": resume,
            "started": started,
            "folder": str(Path.cwd()),
            "desk": desk,
        }
        with _shown(desk):
            try:
                _trainer(
                    config, workers, folder or Path(recipe.run.out).expanduser().absolute() / ".ray"
                ).fit()
            except TrainingFailedError as error:
                raise _failure(ray.get(desk.failures_so_far.remote()), error, workers, address) from None
            except SystemExit:  # how Ray Train leaves after SIGINT
                raise Stopped(signal.SIGINT, f"the workers were ended; go on with {go_on}") from None
        run: Path = ray.get(desk.outcome.remote())
        return run


def _require_ray(address: str, environment: MutableMapping[str, str]) -> None:
    """Sets what Ray reads when it is imported, and imports it."""
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)
    try:
        import ray.train  # noqa: F401 - whether it can be
    except ImportError as error:
        raise UserError(
            f'--ray {address}: Ray is not installed; pip install "longstrand[ray]", or start with --workers or torchrun'
        ) from error


class _Desk:
    """An actor between the workers and the process that waits for them: text to show, errors, the result."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.failures: list[tuple[int, LongstrandError | None, str]] = []
        self.run: Path | None = None

    def say(self, text: str) -> None:
        self.text.append(text)

    def take(self) -> str:
        text, self.text = "".join(self.text), []
        return text

    def fail(self, rank: int, error: LongstrandError | None, trace: str) -> None:
        self.failures.append((rank, error, trace))

    def failures_so_far(self) -> list[tuple[int, LongstrandError | None, str]]:
        return self.failures

    def finish(self, run: Path) -> None:
        self.run = run

    def outcome(self) -> Path | None:
        return self.run


class _ToDesk(io.TextIOBase):
    """Text that a worker writes, shown by the process that waits."""

    def __init__(self, desk: Any) -> None:
        self._desk = desk

    def write(self, text: str) -> int:
        self._desk.say.remote(text)
        return len(text)


class _Telling:
    """Tells the desk what ends a worker, whatever it is."""

    def __init__(self, desk: Any, rank: int) -> None:
        self._desk, self._rank = desk, rank

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        if isinstance(error, LongstrandError):
            ray.get(self._desk.fail.remote(self._rank, error, ""))
        elif error is not None:
            ray.get(self._desk.fail.remote(self._rank, None, "".join(traceback.format_exception(error))))


def _train_worker(config: dict[str, Any]) -> None:
    """What each worker runs; Ray Train has joined them before."""
    import ray

    desk, world = config["desk"], Axis("world", dist.group.WORLD)
    logging.getLogger("longstrand").propagate = False  # Ray's own handler would show each line again
    stderr = _ToDesk(desk) if world.rank == 0 else sys.stderr
    with _Telling(desk, world.rank), redirect_stderr(stderr):
        _enter(config["folder"], world.rank)
        run = train_as_rank(config["recipe"], world, resume=config["resume"], started=config["started"])
        if world.rank == 0:
            ray.get(desk.finish.remote(run))


def _enter(folder: str, rank: int) -> None:
    """Relative paths of the recipe mean what they mean where the run was started."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(
            f"{folder}: rank {rank} on {socket.gethostname()} has no such folder ({error.strerror}); start from one "
            "that all machines of the cluster share"
        ) from error


def _trainer(config: dict[str, Any], workers: int, folder: Path) -> Any:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    limits: dict[str, Any] = {"max_failures": 0, "controller_failure_limit": STARTS - 1}
    on_gpus = ray.cluster_resources().get("GPU", 0) >= workers
    return TorchTrainer(
        _train_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=on_gpus),
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout_s=MEETING_SECONDS
        ),
        run_config=RunConfig(
            name="longstrand",
            storage_path=str(folder),
            failure_config=FailureConfig(**limits),
        ),
    )


@contextmanager
def _session(address: str, workers: int) -> Iterator[Path | None]:
    """Joins a cluster, or starts a Ray whose processes and folder end with it; yields that folder."""
    import ray

    given: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.WARNING}
    folder = None
    if address == "local":
        folder = Path(tempfile.mkdtemp(prefix="ls-ray-"))  # short: the paths of sockets in it are limited
        given |= {
            "num_cpus": workers,
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": str(folder),
        }
    else:
        _require_cluster(address)
    began = time.monotonic()
    try:
        try:
            ray.init(**given)
        except LongstrandError:  # a signal came
            raise
        except Exception as error:  # Ray raises bare ones where a part of it is late
            raise _not_started(address, workers, error, f"{time.monotonic() - began:.0f} s") from error
        yield folder
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _require_cluster(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise UserError(f'--ray {address}: must be "local", or HOST:PORT of a cluster, such as 10.0.0.1:6379')
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f'--ray {address}: no cluster answers there ({error}); check the address, or use "local"'
        ) from error


@contextmanager
def _shown(desk: Any) -> Iterator[None]:
    """Prints what the first rank says, as it comes."""
    import ray

    done, stderr = threading.Event(), shown(sys.stderr)

    def show() -> None:
        last = False
        while not last:
            last = done.wait(_POLL_SECONDS)
            text = ray.get(desk.take.remote())
            stderr.write(text)
            stderr.flush()

    printer = threading.Thread(target=show, daemon=True)
    printer.start()
    try:
        yield
    finally:
        done.set()
        printer.join(10)


@contextmanager
def _ended_by_signals(go_on: str) -> Iterator[None]:
    """SIGTERM ends the run as SIGINT does, instead of leaving Ray's processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(number: int, frame: FrameType | None) -> None:
        raise Stopped(number, f"the workers were ended; go on with {go_on}")

    before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failure(
    told: list[tuple[int, LongstrandError | None, str]], error: Exception, workers: int, address: str
) -> LongstrandError:
    """The first thing that went wrong: a worker that died says nothing, and the others fail because it is gone."""
    cause: Any = getattr(error, "controller_failure", None)
    if type(cause).__name__.startswith("WorkerGroupStartup"):
        return _not_started(address, workers, cause, f"{STARTS} times")
    said = {rank for rank, _, _ in told}
    lost = [rank for rank in getattr(error, "worker_failures", {}) if rank not in said]
    known = [each for _, each, _ in told if each is not None]
    own = [each for each in known if not isinstance(each, RankLost)]
    if own:
        own[0].said_by_another = False  # a worker says nothing itself
        return own[0]
    if lost:
        return RunFailed(
            f"rank {lost[0]} of {workers} died without a word (a signal such as that of the out-of-memory killer, or a "
            f"crash); the others were ended; {OUT_OF_MEMORY}, and go on with --resume"
        )
    for rank, each, trace in told:
        if each is None:
            return RunFailed(f"rank {rank} of {workers} failed:\n{trace}")
    return known[0] if known else RunFailed(f"Ray Train failed:\n{error}")


def _not_started(address: str, workers: int, error: BaseException, tried: str) -> RunFailed:
    """Ray's own words, first line only: what follows is about Ray's inside."""
    words = str(error).strip().partition("\n")[0] or type(error).__name__
    return RunFailed(
        f"--ray {address} --workers {workers}: Ray did not start, tried {tried} ({words}); look whether machine or "
        f"cluster has {workers} CPUs, memory and disk free, and start again, or without Ray: --workers {workers}"
    )
