"""Measures every figure that an issue asks for, each in its own process, and keeps the results in one JSON file.

    python -m longstrand.bench.figures --issue A [--only NAME] [--data DIR]

A figure is a function of this package, which returns one record or a list of them: `asked`, `measured` and `pass`, and
optionally `name`, `detail` or `skipped` (what to fetch so that it can be measured). A `table` in a detail is written
beside the JSON file as Markdown, and copied into the pages that show it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from longstrand.bench._results import PAGES, RESULTS, fill_page, keep, provenance, write_table

Record = dict[str, Any]

ISSUES: dict[str, dict[str, str]] = {  # issue -> figure -> module, or module:function
    "A": {
        "parity": "parity",
        "repeats": "repeats",
        "mutations": "mutations",
        "tiles": "tiles",
        "memory": "memory",
        "speed": "step",
        "demo": "demo",
        "crash": "crash",
        "bad_input": "bad_input",
    },
    "B": {
        "speed": "step:measure_two_threads",
        "wide": "wide",
        "levers": "levers",
        "ops": "ops",
        "time": "curve",
        "million": "million",
        "two_million": "million:measure_two",
        "length": "length",
        "growth": "growth",
        "profile": "step:measure_profile",
        "human_x": "human_x",
    },
    "C": {
        "equal": "equal",
        "skew": "skew",
        "bytes": "exchanged",
        "balance": "balance",
        "scale": "scale",
        "reshard": "reshard",
        "caught": "caught",
        "ray": "ray_run",
    },
    "D": {
        "memory": "planned_memory",
        "time": "planned_time",
        "anchors": "anchors",
        "answers": "answers",
        "audit": "audited",
        "probe": "probed",
    },
}
THREADS = {"A": 1, "B": 2, "C": 1, "D": 1}  # of each process
FIELDS = ("name", "asked", "measured", "pass", "skipped", "detail")
WIDTHS = (46, 22, 22, 7)  # name, asked, measured, verdict: 100 columns with their gaps


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the figures; 0 when every one of them passes or is skipped, 1 when one falls short."""
    options = _parse(arguments)
    figures = ISSUES[options.issue]
    if options.child:
        torch.set_num_threads(THREADS[options.issue])
        records = measure_figure(options.child, figures[options.child], options.data)
        options.out.write_text(json.dumps(records))
        return 0
    path = RESULTS / f"{options.issue}.json"
    failed = skipped = 0
    for name in [options.only] if options.only else figures:
        print(f"== {name}", flush=True)
        entry = _measure_apart(options.issue, name, options.data)
        keep(path, name, entry)
        print_table(entry["records"])
        for record in entry["records"]:
            if table := (record["detail"] or {}).get("table"):
                write_table(table.get("name", name), table)  # figures of two issues may share a name
        failed += not entry["pass"]
        skipped += any("skipped" in record for record in entry["records"])
    for page in filter(Path.exists, PAGES):
        fill_page(page)
    print(f"{path}: {failed} figures fall short, {skipped} skipped for lack of data")
    return int(failed > 0)


def measure_figure(name: str, module: str, data: Path | None) -> list[Record]:
    """Runs a figure in this process; its records with all fields in place."""
    file, _, function = module.partition(":")
    measure = getattr(importlib.import_module(f"longstrand.bench.{file}"), function or "measure")
    takes_data = "data" in inspect.signature(measure).parameters
    found = measure(data=data) if takes_data else measure()
    return [_complete(record, name) for record in (found if isinstance(found, list) else [found])]


def show(found: list[Record] | Record, name: str = "") -> int:
    """Prints records as a table; the exit code of `longstrand bench NAME`: 0 or, where one falls short, 1."""
    records = [_complete(record, name) for record in (found if isinstance(found, list) else [found])]
    print_table(records)
    return int(not passes(records))


def passes(records: Sequence[Record]) -> bool:
    """Whether there are records, and each passes or was skipped for lack of data."""
    return bool(records) and all(record["pass"] or "skipped" in record for record in records)


def print_table(records: Sequence[Record]) -> None:
    """Asked, measured and verdict, in lines of at most 100 characters."""
    for cells in _rows(records):
        columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, WIDTHS, strict=True)]
        for line in range(max(len(column) for column in columns)):
            parts = [column[line] if line < len(column) else "" for column in columns]
            print(" ".join(part.ljust(width) for part, width in zip(parts, WIDTHS, strict=True)).rstrip())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m longstrand.bench.figures", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--issue", choices=sorted(ISSUES), default="A")
    names = sorted({name for figures in ISSUES.values() for name in figures})
    parser.add_argument("--only", choices=names, help="this figure alone")
    parser.add_argument("--data", type=Path, help="folder with data that the package does not ship")
    parser.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _measure_apart(issue: str, name: str, data: Path | None) -> dict[str, Any]:
    """Measures a figure in its own process, at its issue's number of threads; one that fails is a figure that fails."""
    began, facts = time.perf_counter(), provenance(THREADS[issue])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.json"
        command = [sys.executable, "-m", "longstrand.bench.figures", "--issue", issue]
        command += ["--child", name, "--out", str(out), *(["--data", str(data)] if data else [])]
        code = subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": str(THREADS[issue])}, check=False
        ).returncode
        records = json.loads(out.read_text()) if code == 0 else [_failure(name, code)]
    return {
        "pass": passes(records),
        "records": records,
        "command": f"make figures ISSUE={issue} ONLY={name}" + (f" DATA={data}" if data else ""),
        **facts,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _failure(name: str, code: int) -> Record:
    reason = f"its process ended with {code}; its message stands above"
    return {"name": name, "asked": "a measurement", "measured": reason, "pass": False, "detail": None}


def _complete(record: Record, name: str) -> Record:
    """All fields in place; whatever else a figure returns is its detail."""
    more = {key: value for key, value in record.items() if key not in FIELDS}
    named = {
        "name": record.get("name", name),
        "asked": record.get("asked"),
        "measured": record.get("measured"),
    }
    whole = named | {"pass": bool(record["pass"]), "detail": record.get("detail", more or None)}
    return whole | ({"skipped": record["skipped"]} if "skipped" in record else {})


def _rows(records: Sequence[Record]) -> Iterator[tuple[str, str, str, str]]:
    yield "figure", "asked", "measured", ""
    for record in records:
        asked, measured = record["asked"], record["measured"]
        verdict = "skipped" if "skipped" in record else "pass" if record["pass"] else "SHORT"
        if "skipped" in record:
            yield record["name"], _text(asked), record["skipped"], verdict
        elif isinstance(asked, dict) or isinstance(measured, dict):
            yield record["name"], "", "", verdict
            parts = [part if isinstance(part, dict) else {"": part} for part in (asked, measured)]
            for key in dict.fromkeys([*parts[0], *parts[1]]):
                yield f"  {key}", _text(parts[0].get(key)), _text(parts[1].get(key)), ""
        else:
            yield record["name"], _text(asked), _text(measured), verdict


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
