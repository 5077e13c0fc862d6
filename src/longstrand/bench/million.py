"""The figures of a million tokens and more: one whole training step on human X in one sequence.

    longstrand bench million --data DIR [--length 4M] [settings of our side]

A step is forward, backward, gradient norm, clipping and AdamW, after a short one that makes the optimizer's state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longstrand.bench._arguments import parsed_length
from longstrand.bench._results import publish
from longstrand.bench._trial import Trial, human_x, parser, run_apart, skipped, trial_from
from longstrand.bench.figures import show
from longstrand.errors import UserError

MILLION = 2**20
GIB = 2**30
SECONDS = 600.0
COLUMNS = ("tokens", "levers", "seconds", "tokens/s", "peak MiB", "of it after import")


def measure(data: Path | None) -> list[dict[str, Any]]:
    """1,048,576 tokens: at most 3 GiB with disk offload, 14 GiB without a lever, under ten minutes."""
    asked: list[tuple[Trial, float]] = [
        (Trial(MILLION, offload="disk"), 3 * GIB),
        (Trial(MILLION), 14 * GIB),
    ]
    return judge(asked, data, SECONDS)


def measure_two(data: Path | None) -> list[dict[str, Any]]:
    """2,097,152 tokens: at most 4 GiB with disk offload; the time is shown."""
    return judge([(Trial(2 * MILLION, offload="disk"), 4 * GIB)], data, None)


def judge(
    asked: Sequence[tuple[Trial, float]], data: Path | None, seconds: float | None
) -> list[dict[str, Any]]:
    """Peak and time of each trial."""
    fasta = human_x(data)
    records: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for trial, most_bytes in asked:
        levers = _levers(trial)
        name = f"one step of {trial.tokens:,} tokens of human X, {levers}"
        if fasta is None:
            records.append(skipped(name, f"at most {most_bytes / GIB:g} GiB"))
            continue
        run = run_apart(replace(trial, fasta=str(fasta), optimizer=True, steps=1))
        took, peak = run["seconds"][0], run["peak_bytes"]
        records += [
            {
                "name": f"{name}: peak, GiB",
                "asked": "shown" if most_bytes == math.inf else f"at most {most_bytes / GIB:g}",
                "measured": round(peak / GIB, 2),
                "pass": peak <= most_bytes,
                "detail": run,
            },
            {
                "name": f"{name}: seconds",
                "asked": "shown" if seconds is None else f"under {seconds:g}",
                "measured": round(took),
                "pass": seconds is None or took < seconds,
            },
        ]
        imported = f"{run['after_import_bytes'] / 2**20:,.0f}"
        speed = run["tokens_per_second"]
        rows.append(
            [f"{trial.tokens:,}", levers, f"{took:,.0f}", f"{speed:,.0f}", f"{peak / 2**20:,.0f}", imported]
        )
    if rows:
        records[0]["detail"]["table"] = {"columns": list(COLUMNS), "rows": rows}
    return records


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench million`."""
    options_of = parser("million", __doc__)
    options_of.add_argument("--data", type=Path, required=True, help="folder of the FASTA of human X")
    options_of.add_argument("--length", type=parsed_length, default=MILLION, help="such as 2M")
    options = options_of.parse_args(list(arguments))
    if human_x(options.data) is None:
        raise UserError(f"--data {options.data}: {skipped('', '')['skipped']}")
    records = judge([(trial_from(options, options.length), math.inf)], options.data, None)
    publish("million", records[0]["detail"]["table"], {"records": records})
    return show(records)


def _levers(trial: Trial) -> str:
    used = [f"offload={trial.offload}"] if trial.offload != "none" else []
    used += [f"keep_every={trial.keep_every}"] if trial.keep_every > 1 else []
    return ", ".join(used) or "no lever"
