"""The planner's answers to the questions people ask first, each from a fresh process, with how long it took.

longstrand bench answers
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longstrand.bench._arguments import command_line
from longstrand.bench.figures import show
from longstrand.plan.devices import GIB
from longstrand.plan.summary import gib

SECONDS = 2.0
RUNS = 3
MILLION = "--model glm-5.3-flash --device B200 --devices 64 --length 1M --host-memory 2048"
LENGTHS = "--model glm-5.3-flash --device B200 --devices 64 --sweep 16k..4M --host-memory 2048"
SLICE = "--model glm-5.3-flash-4-layers --device H200"


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        options: of `longstrand plan`.
    """

    name: str
    options: str
    published: str = ""


QUESTIONS = (
    Question("all parameters of GLM-5.3-Flash, 1M tokens, 64 B200", MILLION, "144.5 GiB, 13,700 tokens/s"),
    Question(
        "4 layers of it, longest sequence, 1 H200", f"{SLICE} --fit length --host-memory 256 --host-disk 0"
    ),
    Question("the same with 7 TiB of disk", f"{SLICE} --fit length --host-memory 256 --host-disk 7168"),
    Question(
        "4 layers of it, longest sequence, 8 H200",
        f"{SLICE} --devices 8 --fit length --host-memory 2048 --host-disk 0",
    ),
    Question(
        "the same with 28 TiB of disk",
        f"{SLICE} --devices 8 --fit length --host-memory 2048 --host-disk 28672",
    ),
    Question(
        "all of it, 4M tokens, fewest B200",
        "--model glm-5.3-flash --device B200 --length 4M --fit devices --host-memory 2048 --host-disk 0",
    ),
)


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "tokens": lambda plan: f"{plan['length']:,}",
    "devices": lambda plan: str(plan["devices"]),
    "data x context, expert": lambda plan: "{data} x {context}, {expert}".format(**plan["parallel"]),
    "GiB per device": lambda plan: gib(plan["device_bytes"]),
    "GiB per host": lambda plan: gib(plan["host"]["bytes"]),
    "GiB in files": lambda plan: gib(plan["files"]["bytes"]),
    "tokens/s": lambda plan: _rate(plan),
    "levers": lambda plan: _levers(plan),
}
"""What a table shows of a plan."""


def measure() -> list[dict[str, Any]]:
    """The questions, then the terms of the first answer and the same machine over the length; a table of each."""
    return [*measure_questions(), measure_terms(), measure_lengths()]


def measure_questions() -> list[dict[str, Any]]:
    """A record per question: it fits, and is answered in less than two seconds."""
    records, rows = [], []
    for question in QUESTIONS:
        plan, seconds = answer(question.options)
        shown = {name: cell(plan) for name, cell in COLUMNS.items()}
        asked_with = f"`{question.options}`"
        rows.append([question.name, *shown.values(), question.published, f"{seconds:.2f}", asked_with])
        records.append(
            {
                "name": question.name,
                "asked": f"fits; answered in under {SECONDS:g} s",
                "measured": f"{shown['tokens']} tokens on {shown['devices']}, {shown['GiB per device']} GiB each, "
                f"{shown['tokens/s']} tokens/s; {seconds:.2f} s",
                "pass": plan["fits"] and seconds < SECONDS,
                "published": question.published,
                "command": f"longstrand plan {question.options}",
                "seconds": seconds,
                "plan": plan,
            }
        )
    records[-1]["table"] = {
        "name": "answers",
        "columns": ["question", *COLUMNS, "published", "answered in, s", "longstrand plan"],
        "rows": rows,
    }
    return records


def measure_terms() -> dict[str, Any]:
    """The memory and the seconds of a million tokens on 64 B200, term by term."""
    plan, seconds = answer(MILLION)
    peak, time = plan["phases"][plan["peak_phase"]], plan["seconds"]
    summed = [f"sum at the peak ({plan['peak_phase']})", gib(plan["device_bytes"]), ""]
    taken = ["sum, seconds", f"{time['total']:.2f}", "", f"{_rate(plan)} tokens/s; published: 13,700"]
    rows = [
        *(_row(term, gib(term["bytes"])) for term in sorted(peak, key=lambda term: -term["bytes"])),
        [*summed, "of 178 GiB; published: 144.5"],
        *(_row(term, f"{term['seconds']:.2f}", ", seconds") for term in time["terms"]),
        taken,
    ]
    added = sum(term["bytes"] for term in peak)
    return {
        "name": "the first one, term by term",
        "asked": "terms that add up to the peak",
        "measured": f"{len(peak)} terms, {added / GIB:.1f} GiB",
        "pass": added == plan["device_bytes"] and plan["fits"],
        "seconds": seconds,
        "table": {"name": "answer_terms", "columns": ["term", "GiB", "known by", "how"], "rows": rows},
    }


def measure_lengths() -> dict[str, Any]:
    """Memory and tokens per second over the length, on 64 B200."""
    plans, seconds = answer(LENGTHS)
    columns = ("tokens", "GiB per device", "GiB per host", "tokens/s", "levers")
    return {
        "name": "over the length, 64 B200",
        "asked": f"9 lengths in under {SECONDS:g} s",
        "measured": f"{len(plans)} lengths, {sum(plan['fits'] for plan in plans)} fit; {seconds:.2f} s",
        "pass": len(plans) == 9 and seconds < SECONDS,
        "seconds": seconds,
        "table": {
            "name": "answer_lengths",
            "columns": columns,
            "rows": [[COLUMNS[name](plan) for name in columns] for plan in plans],
        },
    }


def answer(options: str) -> tuple[Any, float]:
    """What `longstrand plan ... --json` says, and the median seconds of its process from start to end."""
    command = [sys.executable, "-m", "longstrand", "plan", *shlex.split(options), "--json"]
    taken, said = [], ""
    for _ in range(RUNS):
        began = time.perf_counter()
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        taken.append(time.perf_counter() - began)
        if ended.returncode not in (0, 3):
            raise RuntimeError(f"{shlex.join(command)} ended with {ended.returncode}: {ended.stderr}")
        said = ended.stdout
    return json.loads(said), statistics.median(taken)


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench answers`."""
    command_line("answers", __doc__).parse_args(list(arguments))
    return show(measure())


def _row(term: Mapping[str, Any], value: str, unit: str = "") -> list[str]:
    return [f"{term['name']}{unit}", value, term["evidence"].partition(":")[0], term["why"]]


def _rate(plan: Mapping[str, Any]) -> str:
    return f"{plan['seconds']['tokens_per_second']:,.0f}" if plan["fits"] else "does not fit"


def _levers(plan: Mapping[str, Any]) -> str:
    """Those that are on."""
    settings = (f"{each['setting'].partition('.')[2]} = {each['value']}" for each in plan["levers"])
    return ", ".join(settings) or "none"
