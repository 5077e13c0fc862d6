"""The figure of planned seconds: a plan calibrated on some runs against the time of others.

    longstrand bench planned_time [--rounds N]

A run is one whole training step of the toy in float32 with its CPU kernels, in a process of its own with one thread,
after a short step: forward, backward, gradient norm, AdamW. CPU time counts, so that other programs on the machine do
not. Rounds alternate over all settings; medians. What is held out takes no part in the calibration: lengths, a tile
size and a width.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from longstrand.architecture import Architecture
from longstrand.bench._arguments import command_line, parsed_count
from longstrand.bench._results import publish
from longstrand.bench._steps import architecture, random_pack
from longstrand.bench.figures import show
from longstrand.config import MemorySection, TrainSection
from longstrand.memory import Levers
from longstrand.memory.counted import CountedMemory
from longstrand.model import load_model
from longstrand.ops.native import native_state, use_native
from longstrand.parallel import run_ranks
from longstrand.plan.calibrate import Calibration, Measured, fit
from longstrand.plan.devices import find_device
from longstrand.plan.job import Job
from longstrand.plan.seconds import plan_seconds
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names
from longstrand.train.step import take_step

ASKED = 0.15
ROUNDS = 3


@dataclass(frozen=True)
class Setting:
    """One run.

    Args:
        width: of the model's hidden state; all else is the toy's.
    """

    tokens: int
    tile: int = 1024
    width: int = 128

    @property
    def shape(self) -> Architecture:
        return replace(architecture("toy"), hidden_size=self.width)

    @property
    def job(self) -> Job:
        return Job(
            self.shape, self.tokens, dtype="float32", memory=MemorySection(tile=self.tile), form="native"
        )

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, tile {self.tile:,}, width {self.width:,}"


CALIBRATED = (
    Setting(4096),
    Setting(16_384),
    Setting(49_152),
    Setting(16_384, tile=256),
    Setting(16_384, width=512),
    Setting(4096, tile=256, width=512),
)
HELD_OUT = (
    Setting(8192),
    Setting(32_768),
    Setting(65_536),
    Setting(8192, tile=512),
    Setting(8192, width=256),
)
COLUMNS = (
    "tokens",
    "tile",
    "width",
    "used",
    "CPU seconds",
    "lowest to highest",
    "estimated",
    "calibrated",
    "error",
)


def measure() -> list[dict[str, Any]]:
    """Three rounds of all settings."""
    return judge(ROUNDS)


def judge(rounds: int) -> list[dict[str, Any]]:
    """Runs all settings, calibrates on some and compares with the others."""
    runs = measured(rounds)
    calibration = fit([_as_measured(setting, runs[setting]) for setting in CALIBRATED])
    errors = {str(setting): error_of(setting, runs[setting], calibration) for setting in HELD_OUT}
    worst = max(errors, key=lambda name: abs(errors[name]))
    return [
        {
            "name": "seconds of a step, calibrated plan against held-out runs: largest error",
            "asked": f"at most {ASKED:.0%}",
            "measured": f"{errors[worst]:+.1%} ({worst})",
            "pass": abs(errors[worst]) <= ASKED,
            "detail": {
                "errors": errors,
                "factors": dict(calibration.factors),
                "notes": list(calibration.notes),
                "runs": {str(setting): found for setting, found in runs.items()},
                "table": table(runs, calibration),
            },
        }
    ]


def measured(rounds: int) -> dict[Setting, list[float]]:
    """CPU seconds of each setting, round by round."""
    runs: dict[Setting, list[float]] = {setting: [] for setting in (*CALIBRATED, *HELD_OUT)}
    for _ in range(rounds):
        for setting, own in runs.items():
            (seconds,) = run_ranks(1, _timed, setting)
            own.append(seconds)
            print(f"{setting}: {seconds:.2f} CPU s", flush=True)
    return runs


def error_of(setting: Setting, seconds: Sequence[float], calibration: Calibration) -> float:
    """Predicted over measured, less one."""
    planned = plan_seconds(setting.job, find_device("CPU"), calibration.factors).total
    return planned / statistics.median(seconds) - 1


def table(runs: Mapping[Setting, Sequence[float]], calibration: Calibration) -> dict[str, Any]:
    """One row per setting."""
    rows = []
    for setting, seconds in runs.items():
        plans = [plan_seconds(setting.job, find_device("CPU"), f).total for f in (None, calibration.factors)]
        rows.append(
            [
                f"{setting.tokens:,}",
                f"{setting.tile:,}",
                f"{setting.width:,}",
                "held out" if setting in HELD_OUT else "calibrated on",
                f"{statistics.median(seconds):.2f}",
                f"{min(seconds):.2f} to {max(seconds):.2f}",
                *(f"{plan:.2f}" for plan in plans),
                f"{error_of(setting, seconds, calibration):+.1%}",
            ]
        )
    return {"name": "planned_time", "columns": list(COLUMNS), "rows": rows}


def _as_measured(setting: Setting, seconds: Sequence[float]) -> Measured:
    terms = plan_seconds(setting.job, find_device("CPU")).terms
    return Measured(str(setting), {term.name: term.seconds for term in terms}, statistics.median(seconds))


def _timed(setting: Setting) -> float:
    """CPU seconds of a step, in this process."""
    torch.set_num_threads(1)
    CountedMemory(torch.device("cpu"))  # tensors lie as in training
    if not use_native("native").used:
        raise AssertionError(native_state())
    settings = TrainSection(steps=100, sequences_per_step=1, lr=1e-3)
    model = load_model(setting.shape, torch.float32, seed=0)
    names = trained_names(model.groups(), settings)
    freeze_all_but(model, names)
    optimizer, levers = Optimizer(model, names, settings), Levers(tile=setting.tile)
    short = min(setting.tokens, 2 * setting.tile + setting.shape.index_topk)
    take_step(model, [random_pack(short)], optimizer, settings, step=1, levers=levers)
    pack = random_pack(setting.tokens)
    gc.freeze()
    began = time.process_time()
    take_step(model, [pack], optimizer, settings, step=2, levers=levers)
    return time.process_time() - began


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench planned_time`."""
    options_of = command_line("planned_time", __doc__)
    options_of.add_argument("--rounds", type=parsed_count, default=ROUNDS, help="of alternating runs")
    options = options_of.parse_args(list(arguments))
    torch.set_num_threads(1)
    records = judge(options.rounds)
    publish("planned_time", records[0]["detail"]["table"], {"records": records})
    return show(records)
