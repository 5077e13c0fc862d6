"""The bad-input figure: how many different checks the tests of bad input reach, by kind, each in one line.

A check is told from another by where its error was raised and by what its message says once names, paths and numbers
are taken out. Tests that end in a counted ledger entry instead of an error are counted beside them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import longstrand
from longstrand.bench._arguments import command_line, one_of
from longstrand.bench.figures import show

ASKED = 10
TESTS = Path(longstrand.__file__).parents[2] / "tests"
KINDS: dict[str, tuple[str, ...]] = {  # kind -> tests of bad input
    "FASTA": ("data/test_fasta.py",),
    "BED": ("data/test_regions.py",),
    "JSONL": ("data/test_jsonl.py",),
    "config": ("test_config.py", "model/test_architecture.py"),
    "checkpoint": ("test_state.py", "model/test_hf_load.py"),
    "disk": ("train/test_bad_disk.py",),
}
_VALUES = re.compile(r"\"[^\"]*\"|'[^']*'|\S*/\S*|0x\w+|\d[\d.,]*|\[[^]]*\]")


def measure(kinds: tuple[str, ...] = tuple(KINDS)) -> list[dict[str, Any]]:
    """One record per kind: how many different checks its tests reach."""
    return [_measure_kind(kind) for kind in kinds]


def main(arguments: list[str]) -> int:
    """`longstrand bench bad_input [KIND ...]`."""
    options_of = command_line("bad_input", __doc__)
    options_of.add_argument("kinds", type=one_of(KINDS), nargs="*", metavar="KIND", help=", ".join(KINDS))
    return show(measure(tuple(options_of.parse_args(arguments).kinds) or tuple(KINDS)))


def _measure_kind(kind: str) -> dict[str, Any]:
    files = [TESTS / name for name in KINDS[kind]]
    absent = [str(file) for file in files if not file.exists()]
    if absent:
        return _record(kind, 0, False, {"absent": absent})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "refusals.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "longstrand.bench._refusals",
            "--refusals",
            str(out),
        ]
        done = subprocess.run([*command, *map(str, files)], cwd=TESTS.parent, capture_output=True, text=True)
        tests = json.loads(out.read_text()) if out.exists() else []
    errors = [error for test in tests for error in test["errors"]]
    checks = {(*error["raised"], _VALUES.sub("", error["message"])) for error in errors}
    failed = [test["test"] for test in tests if not test["passed"]]
    long = [error["message"] for error in errors if "\n" in error["message"]]
    detail = {
        "tests": len(tests),
        "tests that met an error": sum(bool(test["errors"]) for test in tests),
        "failed": failed,
        "messages of several lines": long,
        "last line of pytest": (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1],
    }
    return _record(kind, len(checks), done.returncode == 0 and not failed and not long, detail)


def _record(kind: str, checks: int, sound: bool, detail: dict[str, Any]) -> dict[str, Any]:
    name = f"bad {kind}: different checks reached"
    return {
        "name": name,
        "asked": ASKED,
        "measured": checks,
        "pass": sound and checks >= ASKED,
        "detail": detail,
    }
