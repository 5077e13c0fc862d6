"""Where results are kept: one JSON file and one Markdown table per measurement, which the documentation copies."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

RESULTS = Path("benchmarks/results")  # of `make figures`
OWN = RESULTS / "own"  # of `longstrand bench`, at settings of one's own: never on a page
PAGES = tuple(Path(f"docs/{name}.md") for name in ("performance", "parallel", "planner", "probe"))
_PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

Table = Mapping[str, Any]  # "columns": names; "rows": lists of text, one per column


def publish(name: str, table: Table, facts: Mapping[str, Any], folder: Path = OWN) -> None:
    """Prints a table and writes NAME.json (with all facts) and NAME.md."""
    print_table(table)
    kept = {"table": table, **facts, **provenance()}
    write(folder / f"{name}.json", json.dumps(kept, indent=1) + "\n")
    write_table(name, table, folder)
    print(f"written: {folder / name}.json and .md")


def print_table(table: Table) -> None:
    """On the terminal, in its width."""
    shown = RichTable(*table["columns"])
    for row in table["rows"]:
        shown.add_row(*map(str, row))
    Console().print(shown, markup=False)


def write_table(name: str, table: Table, folder: Path = RESULTS) -> None:
    """NAME.md: the table, and where, when and from what code it was measured."""
    found = provenance()
    machine, code = found["machine"], found["commit"]
    where = f"{machine['cores']} cores {machine['cpu']}, torch {machine['torch']}, load {machine['load_average'][0]}"
    write(
        folder / f"{name}.md",
        f"{markdown(table)}\nMeasured {found['date'][:10]}: {where}, commit {code[:10]}.\n",
    )


def markdown(table: Table) -> str:
    """A Markdown table; columns whose entries are numbers are aligned to the right."""
    rows = [[str(cell) for cell in row] for row in table["rows"]]
    numeric = [all(re.match(r"[-+]?[\d.]|$", row[i]) for row in rows) for i in range(len(table["columns"]))]
    lines = [table["columns"], ["--:" if right else "---" for right in numeric], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def fill_page(page: Path, folder: Path = RESULTS) -> list[str]:
    """Copies the results into a page, between `<!-- table: NAME -->` and `<!-- end of table -->`; names it lacks."""
    missing: list[str] = []

    def filled(found: re.Match[str]) -> str:
        source = folder / f"{found['name']}.md"
        if not source.exists():
            missing.append(found["name"])
            return found[0]
        return f"{found[1]}{source.read_text()}{found[3]}"

    write(page, _PLACE.sub(filled, page.read_text()))
    return missing


def keep(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Writes one figure's result into the file, beside those of the others; a skipped one replaces no measured one."""
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"version": 1, "figures": {}}
    if name in kept["figures"] and all("skipped" in record for record in entry["records"]):
        return
    kept["figures"][name] = entry
    write(path, json.dumps(kept, indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """Replaces a file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def provenance(threads: int | None = None) -> dict[str, Any]:
    """Code, machine and time of a measurement."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": commit(), "machine": machine(threads), "date": date}


def commit() -> str:
    """HEAD, and whether the sources differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "tests")
    return (git("rev-parse", "HEAD") or "unknown") + (" with changes" if changed else "")


def machine(threads: int | None = None) -> dict[str, Any]:
    """What the numbers were measured on."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [
        line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({} if threads is None else {"threads": threads}),
    }


if __name__ == "__main__":
    for page in PAGES:
        for missing in fill_page(page):
            print(f"{page}: table {missing} is not measured yet")
