"""The figure of a run on human X: 200 steps of 65,536 letters, and the held-out loss by position, whatever it shows.

    longstrand bench human_x --data DIR

The run is `runs/human_x_65k-COMMIT`; one that was stopped is gone on with, by the code that began it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longstrand.bench._arguments import command_line
from longstrand.bench._results import commit
from longstrand.bench._trial import human_x, skipped
from longstrand.bench.figures import show
from longstrand.buckets import BucketSums
from longstrand.config import load_recipe
from longstrand.report import write_report
from longstrand.series import read_series, sums_from
from longstrand.train.sft import train

NAME = "human X, 200 steps of 65,536 letters: held-out bits per base"
COLUMNS = ("letters before the target", "targets", "before", "after", "gain")


def measure(data: Path | None) -> dict[str, Any]:
    """Trains by the recipe `human_x_65k` and evaluates before and after."""
    fasta = human_x(data)
    if fasta is None:
        return skipped(NAME, "shown")
    settings = [f"{part}.sources.0.path={fasta.resolve()}" for part in ("data", "evaluate")]
    settings.append(f"run.out=runs/human_x_65k-{commit()[:10]}")
    run = train(load_recipe("human_x_65k", settings), resume=True)
    page = write_report(run)
    series = {one["name"]: sums_from(one) for one in read_series(run / "evaluate.json")}
    before, after = bits(series["before"]), bits(series["after"])
    return {
        "name": NAME,
        "asked": "shown",
        "measured": f"{before:.4f} before, {after:.4f} after",
        "pass": math.isfinite(after),
        "detail": {"report": str(page), "table": table(series["before"], series["after"])},
    }


def bits(sums: BucketSums) -> float:
    """Mean over all targets."""
    return float(sums.nats.sum() / sums.weight.sum()) / math.log(2)


def table(before: BucketSums, after: BucketSums) -> dict[str, Any]:
    """Bits per base by position."""
    rows = []
    for at, (start, stop) in enumerate(zip(before.edges, before.edges[1:], strict=False)):
        weight = before.weight[:, at].sum()
        first, last = (float(sums.nats[:, at].sum() / weight) / math.log(2) for sums in (before, after))
        rows.append(
            [
                f"{start:,} to {stop:,}",
                f"{weight:,.0f}",
                f"{first:.4f}",
                f"{last:.4f}",
                f"{1 - last / first:.2%}",
            ]
        )
    return {"columns": list(COLUMNS), "rows": rows}


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench human_x`."""
    options_of = command_line("human_x", __doc__)
    options_of.add_argument("--data", type=Path, required=True, help="folder of the FASTA of human X")
    return show(measure(options_of.parse_args(list(arguments)).data))
