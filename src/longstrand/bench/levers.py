"""The levers figure: what each lever of `[memory]` saves and costs at one length.

    longstrand bench levers [--length 262144] [--rounds N] [settings of our side]

A lever that cannot apply on this machine is shown with the reason why it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from longstrand.bench._arguments import parsed_count, parsed_length
from longstrand.bench._results import publish
from longstrand.bench._trial import Trial, parser, run_apart, trial_from
from longstrand.bench.figures import show
from longstrand.bench.step import median
from longstrand.errors import UserError
from longstrand.memory.store import require_other_memory

LENGTH = 262_144
ROUNDS = 3
PUBLISHED = {"memory": -0.31, "time": 0.21}
CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "keep_every = 2": {"keep_every": 2},
    'offload = "disk"': {"offload": "disk"},
    'offload = "disk", keep_every = 2': {"offload": "disk", "keep_every": 2},
}
COLUMNS = ("lever", "peak MiB", "memory", "tokens/s", "lowest to highest", "time")


def measure() -> dict[str, Any]:
    """The toy in float32 at 262,144 tokens, two threads; runs of all levers alternate."""
    return judge(Trial(LENGTH, steps=1), ROUNDS)


def judge(settings: Trial, rounds: int) -> dict[str, Any]:
    """Each lever against none, and disk offload against the published offload."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CHANGES}
    for _ in range(rounds):
        for name, change in CHANGES.items():
            runs[name].append(run_apart(replace(settings, **change)))
    found = {name: compare(runs["none"], own) for name, own in runs.items()}
    disk = found['offload = "disk"']
    return {
        "name": f"disk offload at {settings.tokens:,} tokens",
        "asked": {name: f"at most {value:+.0%} (published)" for name, value in PUBLISHED.items()},
        "measured": {name: f"{disk[name]:+.0%}" for name in PUBLISHED},
        "pass": all(disk[name] <= value for name, value in PUBLISHED.items()),
        "detail": {
            "levers": found,
            "refused": refused(),
            "settings": settings.settings(),
            "runs": runs,
            "table": table(runs, found, refused()),
        },
    }


def compare(none: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Relative change of the peak and of the time."""
    return {
        "memory": median(own, "peak_bytes") / median(none, "peak_bytes") - 1,
        "time": median(none, "tokens_per_second") / median(own, "tokens_per_second") - 1,
    }


def refused() -> dict[str, str]:
    """The levers that this machine cannot use, and what the refusal says."""
    reasons = {}
    for setting in ("offload", "optimizer"):
        try:
            require_other_memory(setting, torch.device("cpu"))
        except UserError as error:
            reasons[f'{setting} = "host"'] = str(error)
    return reasons


def table(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    found: Mapping[str, Mapping[str, float]],
    reasons: Mapping[str, str],
) -> dict[str, Any]:
    """One row per lever, then the refused ones, then what was published."""
    rows = []
    for name, own in runs.items():
        change, speeds = found[name], sorted(run["tokens_per_second"] for run in own)
        rows.append(
            [
                name,
                f"{median(own, 'peak_bytes') / 2**20:,.0f}",
                f"{change['memory']:+.0%}",
                f"{median(own, 'tokens_per_second'):,.0f}",
                f"{speeds[0]:,.0f} to {speeds[-1]:,.0f}",
                f"{change['time']:+.0%}",
            ]
        )
    rows += [[name, "refused", "", "", "", ""] for name in reasons]
    return {"columns": list(COLUMNS), "rows": rows}


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench levers`."""
    options_of = parser("levers", __doc__)
    options_of.add_argument(
        "--length", type=parsed_length, default=LENGTH, help="the verdict is given at the default"
    )
    options_of.add_argument("--rounds", type=parsed_count, default=ROUNDS, help="of alternating runs")
    options = options_of.parse_args(list(arguments))
    record = judge(replace(trial_from(options, options.length), steps=1), options.rounds)
    publish("levers", record["detail"]["table"], {"record": record})
    for reason in record["detail"]["refused"].values():
        print(f"refused: {reason}")
    return show(record) if options.length == LENGTH else 0
