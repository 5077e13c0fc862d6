"""What this machine has, and what will and will not work on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import longstrand
from longstrand.omp_threads import flaw_of_told_threads, told_threads

_GIB = 2**30
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16")
_OPTIONAL = {
    "tokenizers": 'tokenizers other than "bases"; pip install "longstrand[hf]"',
    "tensorboard": 'run.sinks = ["tensorboard"]; pip install "longstrand[tensorboard]"',
    "transformers": 'the model that tests and benchmarks compare with; pip install "longstrand[oracle]"',
}


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and how that is.

    Args:
        state: "note": works, but read it; "missing": something optional; "bad": nothing works without it.
    """

    name: str
    found: str
    state: Literal["ok", "note", "missing", "bad"] = "ok"


def examine(folder: Path, environment: Mapping[str, str]) -> list[Finding]:
    """Looks at the machine.

    Args:
        folder: where runs will be written; its disk is looked at.
        environment: the process's environment variables.
    """
    findings = [
        Finding("longstrand", longstrand.__version__),
        _python(),
        Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        _cpu(),
        _memory(),
        _disk(folder),
        *_torch(environment),
    ]
    return findings + [_package(name, use) for name, use in _OPTIONAL.items()]


def show(findings: list[Finding], console: Console | None = None) -> None:
    """Prints the findings as a table."""
    colours = {"ok": "green", "note": "yellow", "missing": "dim", "bad": "bold red"}
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row(finding.name, f"[{colours[finding.state]}]{finding.state}[/]", escape(finding.found))
    (console or Console()).print(table)


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] == (3, 11):
        return Finding("python", version)
    return Finding("python", f"{version}; tests and figures ran with 3.11", "note")


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    pairs = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set((pairs.get("flags") or pairs.get("Features") or "").split())
    features = [name for name in _FEATURES if name in flags]
    model = pairs.get("model name") or platform.processor() or "unknown CPU"
    return Finding(
        "cpu", f"{model}, {cores} usable cores" + (f" ({', '.join(features)})" if features else "")
    )


def _memory() -> Finding:
    info = Path("/proc/meminfo")
    if not info.exists():
        return Finding("memory", "unknown on this system", "note")
    pairs = dict(line.split(":", 1) for line in info.read_text().splitlines())
    total, free = (int(pairs[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    # The toy at 262,144 tokens peaks at 5.3 GiB (2 cores, float32).
    return Finding("memory", text, "ok" if free >= 2 * _GIB else "note")


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{free / _GIB:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("disk", f"{folder} is not writable; choose run.out elsewhere", "note")
    return Finding("disk", text, "ok" if free >= 2 * _GIB else "note")


def _torch(environment: Mapping[str, str]) -> list[Finding]:
    try:
        import torch
    except ImportError as error:
        return [Finding("torch", f"cannot be imported ({error}); pip install torch", "bad")]
    return [
        Finding("torch", torch.__version__),
        _threads(torch.get_num_threads(), environment),
        _kernels(),
        _accelerator(),
    ]


def _threads(number: int, environment: Mapping[str, str]) -> Finding:
    flaw, told = flaw_of_told_threads(environment), told_threads(environment)
    if flaw is not None:
        return Finding("threads", f"{number}; {flaw}", "note")
    set_by = f" (OMP_NUM_THREADS={told})" if told is not None else ""
    return Finding(
        "threads", f"{number}{set_by}; set run.threads: results are bit-identical only at one number"
    )


def _kernels() -> Finding:
    from longstrand.ops.native import use_native

    state = use_native("auto")
    if state.used:
        return Finding("cpu kernels", f"native: {state.reason}", "ok")
    return Finding("cpu kernels", f"portable (about half as fast): {state.reason}", "note")


def _accelerator() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("gpu", "none: everything runs on the CPU", "ok")
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return Finding(
        "gpu", f"{torch.cuda.device_count()} x {', '.join(names)}; training here uses the CPU only", "note"
    )


def _package(name: str, use: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, f"not installed; needed for {use}", "missing")
