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
from collections.abc import Mapping, Sequence
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


def measure() -> list[dict[str, Any]]:
    """A record per question: it fits, and is answered in less than two seconds."""
    records, rows = [], []
    for question in QUESTIONS:
        plan, seconds = answer(question.options)
        rate = f"{plan['seconds']['tokens_per_second']:,.0f}"
        length, devices = f"{plan['length']:,}", plan["devices"]
        records.append(
            {
                "name": question.name,
                "asked": f"fits; answered in under {SECONDS:g} s",
                "measured": f"{length} tokens on {devices}, {gib(plan['device_bytes'])} GiB each, {rate} tokens/s; "
                f"{seconds:.2f} s",
                "pass": plan["fits"] and seconds < SECONDS,
                "published": question.published,
                "command": f"longstrand plan {question.options}",
                "seconds": seconds,
                "plan": plan,
            }
        )
        levers = _levers(plan)
        mesh = plan["parallel"]
        rows.append(
            [
                question.name,
                length,
                str(devices),
                f"{mesh['data']} x {mesh['context']}, {mesh['expert']}",
                gib(plan["device_bytes"]),
                gib(plan["host"]["bytes"]),
                gib(plan["files"]["bytes"]),
                rate,
                levers,
                question.published,
                f"{seconds:.2f}",
            ]
        )
    columns = [
        "question",
        "tokens",
        "devices",
        "data x context, expert",
        "GiB per device",
        "GiB per host",
        "GiB in files",
    ]
    columns += ["tokens/s", "levers", "published", "answered in, s"]
    records[-1]["table"] = {"columns": columns, "rows": rows}
    return records


def measure_terms() -> dict[str, Any]:
    """The memory and the seconds of a million tokens on 64 B200, term by term."""
    plan, seconds = answer(MILLION)
    rows = [
        [term["name"], gib(term["bytes"]), term["evidence"].partition(":")[0], term["why"]]
        for term in sorted(plan["phases"][plan["peak_phase"]], key=lambda term: -term["bytes"])
    ]
    rows.append(
        [
            f"sum at the peak ({plan['peak_phase']})",
            gib(plan["device_bytes"]),
            "",
            "of 178 GiB; published: 144.5",
        ]
    )
    rows += [
        [
            f"{term['name']}, seconds",
            f"{term['seconds']:.2f}",
            term["evidence"].partition(":")[0],
            term["why"],
        ]
        for term in plan["seconds"]["terms"]
    ]
    total = plan["seconds"]
    rate = f"{total['tokens_per_second']:,.0f} tokens/s; published: 13,700"
    rows.append(["sum, seconds", f"{total['total']:.2f}", "", rate])
    added = sum(term["bytes"] for term in plan["phases"][plan["peak_phase"]])
    return {
        "asked": "terms that add up to the peak",
        "measured": f"{len(plan['phases'][plan['peak_phase']])} terms, {added / GIB:.1f} GiB",
        "pass": added == plan["device_bytes"] and plan["fits"],
        "seconds": seconds,
        "table": {"columns": ["term", "GiB", "known by", "how"], "rows": rows},
    }


def measure_lengths() -> dict[str, Any]:
    """Memory and tokens per second over the length, on 64 B200."""
    plans, seconds = answer(LENGTHS)
    rows = []
    for plan in plans:
        levers = _levers(plan)
        rate = f"{plan['seconds']['tokens_per_second']:,.0f}" if plan["fits"] else "does not fit"
        host = gib(plan["host"]["bytes"])
        rows.append([f"{plan['length']:,}", gib(plan["device_bytes"]), host, rate, levers])
    return {
        "asked": f"9 lengths in under {SECONDS:g} s",
        "measured": f"{len(plans)} lengths, {sum(plan['fits'] for plan in plans)} fit; {seconds:.2f} s",
        "pass": len(plans) == 9 and seconds < SECONDS,
        "seconds": seconds,
        "table": {
            "columns": ["tokens", "GiB per device", "GiB per host", "tokens/s", "levers"],
            "rows": rows,
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
    return show([*measure(), measure_terms() | {"name": "terms"}, measure_lengths() | {"name": "lengths"}])


def _levers(plan: Mapping[str, Any]) -> str:
    """Those that are on."""
    settings = (f"{each['setting'].partition('.')[2]} = {each['value']}" for each in plan["levers"])
    return ", ".join(settings) or "none"
