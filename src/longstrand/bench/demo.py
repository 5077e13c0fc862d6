"""The demo figure: how much of the held-out loss the fine-tune takes away, where, and whether the control keeps it.

    longstrand bench demo [--out FOLDER] [--seeds N]

Improvements are before minus after in bits per base. Intervals are bootstrap intervals over sequences, the two
evaluations of a sequence drawn together.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from longstrand.bench._arguments import command_line
from longstrand.bench.figures import show
from longstrand.buckets import BucketSums, early_and_late
from longstrand.demo.run import demo_folders, run_demo
from longstrand.series import read_series, sums_from

ASKED_FALL = 0.048
ASKED_RATIO = 2.0
ASKED_SECONDS = 600
RESAMPLES = 4000

Record = dict[str, Any]
Improvement = dict[str, float]


def measure(out: Path | None = None, seeds: int = 1) -> list[Record]:
    """Runs the demo and judges each seed.

    Args:
        out: where it is run, and what is there is gone on with (without a measured time then); None: a folder that
            is removed afterwards.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "demo" if out is None else Path(out)
        fresh, began = not folder.exists(), time.monotonic()
        run_demo(folder, seeds)
        seconds = (time.monotonic() - began) / seeds
        found = [
            record for seed, run in enumerate(demo_folders(folder, seeds)) for record in judge(run, seed)
        ]
    took = {"asked": f"< {ASKED_SECONDS} s", "measured": round(seconds), "pass": seconds < ASKED_SECONDS}
    return [*found, {"name": "demo: seconds of one seed", **took}] if fresh else found


def judge(run: Path, seed: int) -> list[Record]:
    """The four statements about one finished run."""
    series = {one["name"]: sums_from(one) for one in read_series(run / "evaluate.json")}
    before, after = series["before"], series["after"]
    fall = 1 - after.nats.sum() / before.nats.sum()
    early, late = improvements(before, after)
    control_early, control_late = improvements(series["control before"], series["control after"])
    ratio = late["bits"] / early["bits"] if early["bits"] > 0 else math.inf
    apart = late["low"] > early["high"]
    lost = control_late["high"] < late["low"] and (
        control_late["bits"] - control_early["bits"] < (late["bits"] - early["bits"]) / 2
    )
    bits = {
        name: round(float(sums.nats.sum() / sums.weight.sum()) / math.log(2), 4)
        for name, sums in series.items()
    }
    gains = {"early": early, "late": late, "control early": control_early, "control late": control_late}
    rows = [
        ("held-out loss falls", f">= {ASKED_FALL:.1%}", f"{fall:.1%}", fall >= ASKED_FALL, bits),
        ("late over early gain", f">= {ASKED_RATIO:g}", round(ratio, 2), ratio >= ASKED_RATIO, gains),
        ("late and early gain apart", "intervals apart", _shown(late, early), apart, None),
        ("control loses the late gain", "lost", _shown(control_late, control_early), lost, None),
    ]
    return [
        {
            "name": f"demo, seed {seed}: {name}",
            "asked": asked,
            "measured": measured,
            "pass": bool(good),
            **({"detail": detail} if detail else {}),
        }
        for name, asked, measured, good, detail in rows
    ]


def improvements(before: BucketSums, after: BucketSums) -> tuple[Improvement, Improvement]:
    """Early (the first 1,024 tokens) and late (the last octave) improvement with 95 % intervals, bits per base.

    Raises:
        ValueError: the two evaluations did not score the same sequences, or the length has no late bucket.
    """
    if (before.ids, before.edges) != (after.ids, after.edges):
        raise ValueError("before and after must score the same sequences over the same buckets")
    early_end, late_start = early_and_late(before.edges)
    if late_start is None:
        raise ValueError(f"edges {before.edges}: no bucket starts at half the length or above")
    last = len(before.edges) - 1
    return tuple(_improvement(before, after, r) for r in (slice(0, early_end), slice(late_start, last)))  # type: ignore[return-value]


def _improvement(before: BucketSums, after: BucketSums, here: slice) -> Improvement:
    weight = before.weight[:, here].sum(axis=1)
    saved = (before.nats - after.nats)[:, here].sum(axis=1) / math.log(2)
    rows = len(weight)
    drawn = np.random.default_rng(0).multinomial(rows, np.full(rows, 1 / rows), size=RESAMPLES)
    draws = (drawn @ saved) / (drawn @ weight)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {"bits": float(saved.sum() / weight.sum()), "low": float(low), "high": float(high)}


def _shown(late: Improvement, early: Improvement) -> str:
    parts = [f"{one['bits']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for one in (late, early)]
    return f"{parts[0]} late, {parts[1]} early"


def main(arguments: Sequence[str]) -> int:
    """The command line: runs the demo and prints the table; 1 where a statement does not hold."""
    parser = command_line("demo", __doc__)
    parser.add_argument(
        "--out", type=Path, default=None, help="folder of the runs; by default a temporary one"
    )
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args(arguments)
    return show(measure(options.out, options.seeds), "demo")
