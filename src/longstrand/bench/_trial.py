"""One training step in a process of its own: what it runs, how it is watched, and when it is ended."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from longstrand.bench._arguments import command_line, parsed_count
from longstrand.errors import RunFailed
from longstrand.memory.levers import Levers, Offload
from longstrand.memory.store import require_other_memory
from longstrand.peak_memory import resident_bytes

Side = Literal["ours", "transformers"]
Kernels = Literal["auto", "native", "portable"]

EVERY_SECONDS = 0.02
HUMAN_X = "human_GRCh37_chrX_1_69999930.fa.gz"


@dataclass(frozen=True)
class Trial:
    """What a process runs: forward and backward of the mean next-token loss of one document.

    Args:
        tokens: its length.
        side: ours, or transformers' text model with gradient checkpointing, sdpa, no cache and our weights.
        config, dtype: the drawn model.
        threads: of torch and of OpenMP.
        tile, recompute, keep_every, offload: ours only, as in `[memory]`.
        kernels: ours only: the ops in their CPU kernels or in plain torch; "auto": where a compiler is.
        experts: transformers' way to compute experts.
        fasta: real bases of human X instead of random tokens.
        optimizer: gradient norm, clipping and AdamW belong to the step.
        steps, seconds: the step is repeated until one of the two is reached.
        spool: folder for spools; None: the system's temporary folder.
        profile: the steps run under a profiler, which costs the short ones a few percent.
    """

    tokens: int
    side: Side = "ours"
    config: Literal["toy", "wide"] = "toy"
    dtype: str = "float32"
    threads: int = 2
    tile: int = 1024
    recompute: bool = True
    keep_every: int = 1
    offload: Offload = "none"
    kernels: Kernels = "auto"
    experts: str = "eager"
    fasta: str | None = None
    optimizer: bool = False
    steps: int = 5
    seconds: float = 10.0
    spool: str | None = None
    profile: bool = False

    @property
    def levers(self) -> Levers:
        """As a pass takes them."""
        return Levers(
            self.tile,
            self.keep_every,
            self.offload,
            self.spool if self.offload == "disk" else None,
            self.recompute,
        )

    def settings(self) -> dict[str, Any]:
        """What differs from the defaults, for a result."""
        standard = Trial(self.tokens)
        return {name: value for name, value in asdict(self).items() if value != getattr(standard, name)}


def run_apart(
    trial: Trial, cap_bytes: int | None = None, limit_seconds: float | None = None
) -> dict[str, Any]:
    """Runs a trial in its own process and returns what it measured.

    Args:
        cap_bytes: the process is killed as soon as its anonymous resident memory exceeds this.
        limit_seconds: it is killed when it takes longer.

    Returns:
        what `_steps.run` returns, or only `ended`: "cap" or "time"; and `watched_peak_bytes`, the peak of the whole
        process, sampled every 20 ms from outside.

    Raises:
        RunFailed: the process ended by itself without a result.
    """
    with tempfile.TemporaryDirectory(prefix="longstrand-bench-", dir=trial.spool) as folder:
        out = Path(folder) / "found.json"
        given = json.dumps(asdict(replace(trial, spool=str(Path(folder) / "spool"))))
        command = [sys.executable, "-m", "longstrand.bench._steps", given, str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": str(trial.threads)}
        ended, peak = watch(command, environment, cap_bytes, limit_seconds)
        found = json.loads(out.read_text()) if out.exists() else {}
        if ended is None and not found:
            raise RunFailed(f"{_named(trial)}: its process ended without a result; its message stands above")
    if found and cap_bytes is not None and found["peak_bytes"] > cap_bytes:
        ended = "cap"  # seen from inside, between two looks from outside
    found = {
        "tokens": trial.tokens,
        "ended": ended,
        "watched_peak_bytes": max(peak, found.get("peak_bytes", 0)),
    } | found
    print(_line(trial, found), file=sys.stderr, flush=True)
    return found


def watch(
    command: Sequence[str],
    environment: dict[str, str],
    cap_bytes: int | None = None,
    limit_seconds: float | None = None,
) -> tuple[Literal["cap", "time"] | None, int]:
    """Runs a command to its end or kills it; why it was killed, and the largest memory seen."""
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    began, peak = time.monotonic(), 0
    try:
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            if cap_bytes is not None and peak > cap_bytes:
                return "cap", peak
            if limit_seconds is not None and time.monotonic() - began > limit_seconds:
                return "time", peak
            time.sleep(EVERY_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return None, peak


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """A command line with the settings of our side."""
    made = command_line(name, text)
    made.add_argument("--threads", type=parsed_count, default=2, help="of torch and of the CPU kernels")
    made.add_argument("--config", choices=("toy", "wide"), default="toy", help="drawn model")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    made.add_argument("--tile", type=parsed_count, default=1024, help="tokens computed at once")
    made.add_argument(
        "--no-recompute", action="store_true", help="keep activations (memory.recompute = false)"
    )
    made.add_argument("--keep-every", type=parsed_count, default=1, help="memory.keep_every")
    made.add_argument("--offload", choices=get_args(Offload), default="none", help="memory.offload")
    made.add_argument("--spool", help="folder for the disk spool; by default the system's temporary folder")
    made.add_argument(
        "--kernels", choices=get_args(Kernels), default="auto", help="CPU kernels, or plain torch"
    )
    return made


def trial_from(options: argparse.Namespace, tokens: int = 0) -> Trial:
    """The trial that a command line asks for.

    Raises:
        UserError: a lever that this machine cannot use.
    """
    if options.offload == "host":
        require_other_memory("offload", torch.device("cpu"))
    return Trial(
        tokens,
        config=options.config,
        dtype=options.dtype,
        threads=options.threads,
        tile=options.tile,
        recompute=not options.no_recompute,
        keep_every=options.keep_every,
        offload=options.offload,
        kernels=options.kernels,
        spool=options.spool,
    )


def human_x(data: Path | None) -> Path | None:
    """The file of human X in a folder of data, if it is there."""
    path = None if data is None else data / HUMAN_X
    return path if path is not None and path.exists() else None


def skipped(name: str, asked: Any, issue: str = "B") -> dict[str, Any]:
    """The record of a figure that lacks human X."""
    command = f"make figures ISSUE={issue} DATA=<the folder it is in>"
    reason = f"needs {HUMAN_X} (Debian package smalt-examples): {command}"
    return {"name": name, "asked": asked, "measured": None, "pass": False, "skipped": reason}


def _named(trial: Trial) -> str:
    settings = ", ".join(f"{name}={value}" for name, value in trial.settings().items() if name != "side")
    return f"{trial.side} at {trial.tokens:,} tokens" + (f" ({settings})" if settings else "")


def _line(trial: Trial, found: dict[str, Any]) -> str:
    what = _named(trial)
    if found["ended"]:
        why = {"cap": "exceeded the memory cap", "time": "took longer than the limit"}[found["ended"]]
        return f"{what}: {why} ({found['watched_peak_bytes'] / 2**20:,.0f} MiB)"
    speed, cpu_speed = found["tokens_per_second"], found["tokens_per_cpu_second"]
    return f"{what}: {speed:,.0f} tokens/s ({cpu_speed:,.0f} per CPU second), {found['peak_bytes'] / 2**20:,.0f} MiB"
