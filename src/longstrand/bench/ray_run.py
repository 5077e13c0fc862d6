"""The figure of starting many ranks: Ray Train, --workers and torchrun give the losses of one process, and end cleanly.

    longstrand bench ray_run

The demo's recipe in float64, shortened, through the command line. For each way to start two ranks: two jobs at once,
one with data = 2 and one with context = 2; a job one of whose ranks is killed (-9) after the second step; and the next
run with --resume. Every process of a job is looked for in the process table once its command has ended.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longstrand.bench._arguments import command_line
from longstrand.bench.figures import show
from longstrand.demo.pretrain import SHIPPED

LIMIT = 1e-10  # relative: how far losses of steps may be apart
END_SECONDS = 60  # from the kill of one rank until the command has ended
LEFT_SECONDS = 10  # more for processes that end by themselves once the command has
DEADLINE = 600  # of one command
KILLED_AFTER = 2  # steps
SETTINGS = {  # of the demo's recipe, instead of its own
    "run.dtype": "float64",
    "data.length": 1024,
    "memory.tile": 256,
    "train.steps": 4,
    "train.warmup_steps": 1,
    "train.sequences_per_step": 2,
    "train.save_every": 1,
    "evaluate.before": "false",
    "evaluate.control": "false",
    "evaluate.sequences": 2,
}
_LONGSTRAND = ("-m", "longstrand", "train")
_FOLDERS = ("ls-ray-", "longstrand-")
_MARK = "LONGSTRAND_BENCH_JOB"

Record = dict[str, Any]
Process = tuple[int, int]
"""Number and time of start, which together no other process has."""


@dataclass(frozen=True)
class Way:
    """A way to start two ranks.

    Args:
        before: what Python is given before the recipe.
        after: options of `longstrand train`.
        rank: in the command line of each rank, and of no other process that the command starts.
        death: what is said of a rank that was killed.
    """

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    rank: bytes
    death: str


WAYS = (
    Way("Ray", _LONGSTRAND, ("--ray", "local", "--workers", "2"), b"RayTrainWorker", r"rank \d of 2 died"),
    Way("--workers", _LONGSTRAND, ("--workers", "2"), b"spawn_main", r"rank \d of 2 was killed by SIGKILL"),
    Way(
        "torchrun",
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *_LONGSTRAND),
        (),
        b"longstrand",
        r"Signal 9 \(SIGKILL\) received by PID",
    ),
)
ONE = Way("one process", _LONGSTRAND, (), b"", "")


def measure() -> list[Record]:
    """Five records per way."""
    return judge(WAYS)


def judge(ways: Sequence[Way]) -> list[Record]:
    """Runs one process, then each way; a way whose package is missing is skipped."""
    with tempfile.TemporaryDirectory(prefix="lb-") as name:  # short: Ray's sockets lie below it
        folder = Path(name)
        single = Job(folder / "one", ONE)
        single.wait()
        if single.code != 0:
            raise RuntimeError(f"the run of one process ended with {single.code}:\n{single.said}")
        return [record for way in ways for record in _judge_way(way, folder, single.losses())]


def _judge_way(way: Way, folder: Path, expected: Sequence[float]) -> list[Record]:
    if way.name == "Ray" and find_spec("ray") is None:
        missing = 'Ray is not installed; pip install "longstrand[ray]"'
        return [{"name": "Ray", "asked": "as one process", "pass": True, "skipped": missing}]
    axes = ("data", "context")
    jobs = [Job(folder / f"{way.name}_{axis}".strip("-"), way, axis) for axis in axes]
    for job in jobs:
        job.wait()
    killed = Job(folder / f"{way.name}_killed".strip("-"), way, "data")
    seconds = killed.kill_a_rank()
    left = killed.left()
    resumed = Job(killed.run, way, "data", resume=True)
    resumed.wait()
    return [
        *(
            _equal(f"{way.name}: {axis} = 2", job, expected, "one process")
            for axis, job in zip(axes, jobs, strict=True)
        ),
        _at_once(way, jobs),
        judge_end(way, killed.code, killed.said, seconds, left),
        _equal(f"{way.name}: --resume after it", resumed, jobs[0].losses(), "the run never stopped"),
    ]


def judge_end(way: Way, code: int | None, said: str, seconds: float, left: Sequence[str]) -> Record:
    """How a command ended one of whose ranks was killed."""
    named = re.findall(way.death, said)
    good = code not in (0, None) and bool(named) and seconds <= END_SECONDS and not left
    return {
        "name": f"{way.name}: a rank killed",
        "asked": {
            "exit code": "not 0",
            "it is named": "yes",
            "seconds": f"<= {END_SECONDS}",
            "left": "nothing",
        },
        "measured": {
            "exit code": code,
            "it is named": "yes" if named else "no",
            "seconds": round(seconds, 1),
            "left": ", ".join(left) or "nothing",
        },
        "pass": good,
        "detail": {
            "said": said[-3000:],
            "looked for": "descendants, and processes with the job's environment",
        },
    }


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of any step; infinite where steps are missing."""
    if len(losses) != len(expected) or not expected:
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))


def _equal(name: str, job: Job, expected: Sequence[float], of: str) -> Record:
    losses = job.losses()
    found = difference(losses, expected)
    return {
        "name": f"{name}: losses are those of {of}",
        "asked": f"<= {LIMIT:g} relative",
        "measured": f"{found:.1e}" if job.code == 0 else f"ended with {job.code}",
        "pass": job.code == 0 and found <= LIMIT,
        "detail": {
            "losses": losses,
            "expected": list(expected),
            "recipe": "demo",
            "set": SETTINGS | job.axes,
            "seconds": round(job.seconds, 1),
            **({} if job.code == 0 else {"said": job.said[-3000:]}),
        },
    }


def _at_once(way: Way, jobs: Sequence[Job]) -> Record:
    left = [each for job in jobs for each in job.left()]
    return {
        "name": f"{way.name}: two jobs at once",
        "asked": {"exit codes": "0, 0", "left": "nothing"},
        "measured": {
            "exit codes": ", ".join(str(job.code) for job in jobs),
            "left": ", ".join(left) or "nothing",
        },
        "pass": all(job.code == 0 for job in jobs) and not left,
        "detail": {"seconds": [round(job.seconds, 1) for job in jobs]},
    }


@dataclass
class Job:
    """One command with a temporary folder of its own, watched from outside: begun when made.

    Args:
        run: the run's folder.
        axis: of `[parallel]`, which has 2 ranks; "": one process.
    """

    run: Path
    way: Way
    axis: str = ""
    resume: bool = False
    code: int | None = None
    seconds: float = 0.0
    said: str = ""
    seen: set[Process] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._scratch = self.run.parent / f"t{len(list(self.run.parent.glob('t*')))}"
        self._scratch.mkdir()
        self._output = self.run.with_name(f"{self.run.name}{'_resumed' * self.resume}.output")
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._scratch),
            _MARK: str(self._output),
        }
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self.command(), stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=self.run.parent
            )

    @property
    def axes(self) -> dict[str, Any]:
        return {f"parallel.{self.axis}": 2} if self.axis else {}

    def command(self) -> list[str]:
        """What is typed."""
        genes = SHIPPED / "resfinder_alleles.fa.gz"
        given = SETTINGS | self.axes | {
            "model.path": SHIPPED / "checkpoint",
            "data.sources": f'[{{path = "{genes}"}}]',
            "data.cache": self.run.parent / "cache",
            "run.out": self.run,
        }  # fmt: skip
        overrides = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
        options = [*overrides, *self.way.after, *(["--resume"] if self.resume else [])]
        return [sys.executable, *self.way.before, "demo", *options]

    def wait(self) -> None:
        """Until the command has ended, at most `DEADLINE` seconds."""
        while self._process.poll() is None:
            self._look()
            if time.monotonic() - self._began > DEADLINE:
                self._process.terminate()
                time.sleep(LEFT_SECONDS)
                self._process.kill()
            time.sleep(0.1)
        self.code, self.seconds = self._process.returncode, time.monotonic() - self._began
        self.said = self._output.read_text(errors="replace")

    def kill_a_rank(self) -> float:
        """Kills one rank after some steps and waits; seconds until the command has ended.

        Raises:
            RuntimeError: it ended before, or its ranks are not found.
        """
        while self._process.poll() is None and len(self.losses()) < KILLED_AFTER:
            time.sleep(0.02)
        self._look()
        ranks = [pid for pid, _ in self.seen if self.way.rank in _read(pid, "cmdline")]
        if len(ranks) != 2:
            self.wait()
            raise RuntimeError(f"{self.way.name}: {len(ranks)} ranks are found:\n{self.said}")
        killed = time.monotonic()
        os.kill(max(ranks), signal.SIGKILL)
        self.wait()
        return time.monotonic() - killed

    def losses(self) -> list[float]:
        """Of the steps so far."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]

    def left(self) -> list[str]:
        """Processes and temporary files that are still there, once they have had some seconds."""
        until = time.monotonic() + LEFT_SECONDS
        while (found := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        return found

    def _look(self) -> None:
        parents = {process: parent for process, parent in processes().items() if process[0] != os.getpid()}
        inside = {self._process.pid}
        while more := {pid for (pid, _), parent in parents.items() if parent in inside} - inside:
            inside |= more
        self.seen |= {process for process in parents if process[0] in inside - {self._process.pid}}

    def _left(self) -> list[str]:
        mark = f"{_MARK}={self._output}\0".encode()
        alive = processes()
        ours = {each for each in alive if each in self.seen or mark in _read(each[0], "environ")}
        names = [_read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:60] for pid, _ in ours]
        own = (path.name for path in self._scratch.iterdir() if path.name.startswith(_FOLDERS))
        return [*names, *own]


def processes() -> Mapping[Process, int]:
    """The processes of this machine that have not ended, with the number of their parent's."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        fields = _read(int(path.name), "stat").rpartition(b")")[2].split()
        if fields and fields[0] not in (b"Z", b"X"):
            found[int(path.name), int(fields[19])] = int(fields[1])
    return found


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench ray_run`."""
    command_line("ray_run", __doc__).parse_args(list(arguments))
    return show(measure())
