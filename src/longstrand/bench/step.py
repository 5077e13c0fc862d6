"""The speed figures: one training step, ours against transformers' text model alone.

Both have the same weights and tokens, threads and dtype, and run in processes of their own that alternate. A step is
forward and backward of the mean loss of next tokens; the optimizer, the same on both sides, is left out.

    longstrand bench step [LENGTH ...] [--rounds N] [--ours] [--profile] [settings of our side]

Model FLOP/s count the products of the model's definition (no recompute; `plan/products.py` has every term), and their
share is of the rate of a 1,024^3 product of the same dtype and threads, measured in the same process.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from longstrand.bench._arguments import parsed_count, parsed_length, require_transformers
from longstrand.bench._results import print_table, publish
from longstrand.bench._steps import architecture
from longstrand.bench._trial import Side, Trial, parser, run_apart, trial_from
from longstrand.bench.figures import show
from longstrand.plan.products import terms

ONE_THREAD = {4096: 8.0, 8192: 20.0}  # length -> at least this many times the oracle's tokens per second
TWO_THREADS = {8192: 40.0, 16_384: 100.0}
PROFILED = (16_384, 262_144, 1_048_576)
ROUNDS = 3
EXPERTS = ("eager", "grouped_mm", "batched_mm")
TRIAL_TOKENS = 1024  # on which transformers' ways to compute experts are compared
COLUMNS = ("tokens", "side", "tokens/s", "peak MiB", "model GFLOP/s", "of matmul")

Runs = dict[Side, list[dict[str, Any]]]


def measure() -> list[dict[str, Any]]:
    """At 4,096 and 8,192 tokens with one thread."""
    return compare(ONE_THREAD, {length: ROUNDS for length in ONE_THREAD}, Trial(0, threads=1))


def measure_two_threads() -> list[dict[str, Any]]:
    """At 8,192 and 16,384 tokens with two threads; twice at the longer one, where transformers takes minutes.

    Ours keeps its activations, which still takes less memory than transformers with checkpoints; what it does with
    recompute, as at longer lengths, is shown beside.
    """
    return compare(TWO_THREADS, {8192: ROUNDS, 16_384: 2}, Trial(0, tile=2048, recompute=False))


def measure_profile() -> dict[str, Any]:
    """Where a step's time goes at three lengths, two threads: the parts with at least a hundredth of it somewhere."""
    runs = {length: run_apart(Trial(length, steps=1, profile=True)) for length in PROFILED}
    shares = [run["profile"] for run in runs.values()]
    parts = [part for part in {*chain(*shares)} if max(own.get(part, 0) for own in shares) >= 0.01]
    parts.sort(key=lambda part: -shares[-1].get(part, 0))
    rows = [[part, *(f"{own.get(part, 0):.1%}" for own in shares)] for part in parts]
    columns = ["part", *(f"{length:,}" for length in PROFILED)]
    detail = {"runs": runs, "table": {"columns": columns, "rows": rows}}
    return {
        "name": "where the time goes",
        "asked": "shown",
        "measured": "shown",
        "pass": True,
        "detail": detail,
    }


def compare(targets: Mapping[int, float], rounds: Mapping[int, int], settings: Trial) -> list[dict[str, Any]]:
    """Two records per length: tokens per second as a multiple of the oracle's, and peak memory beside its."""
    experts, tried = fastest_experts(settings)
    records, every = [], dict[int, Runs]()
    for length, asked in targets.items():
        ours = replace(settings, tokens=length)
        theirs = Trial(
            length,
            "transformers",
            settings.config,
            settings.dtype,
            settings.threads,
            experts=experts,
        )
        runs: Runs = {"ours": [], "transformers": []}
        recomputed: list[dict[str, Any]] = []
        for _ in range(rounds[length]):
            runs["ours"].append(run_apart(ours))
            runs["transformers"].append(run_apart(theirs))
            if not ours.recompute:
                recomputed.append(run_apart(replace(ours, recompute=True)))
        every[length] = runs
        records += _records(length, asked, runs, _described(settings, experts, tried))
        if recomputed:
            records.append(_shown(length, recomputed, runs["transformers"]))
    records[0]["detail"]["table"] = table(every)
    return records


def fastest_experts(settings: Trial) -> tuple[str, dict[str, float]]:
    """transformers' fastest way to compute experts on this machine, and the tokens per CPU second of each."""
    tried = {
        name: run_apart(
            Trial(
                TRIAL_TOKENS, "transformers", settings.config, settings.dtype, settings.threads, experts=name
            )
        )["tokens_per_cpu_second"]
        for name in EXPERTS
    }
    return max(tried, key=lambda name: tried[name]), tried


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench step`."""
    options_of = parser("step", __doc__)
    options_of.add_argument(
        "lengths", type=parsed_length, nargs="*", default=list(TWO_THREADS), metavar="LENGTH"
    )
    options_of.add_argument("--rounds", type=parsed_count, default=ROUNDS)
    options_of.add_argument("--ours", action="store_true", help="without transformers")
    options_of.add_argument("--profile", action="store_true", help="ours, and where its time goes")
    options_of.add_argument("--terms", action="store_true", help="show the model's operations term by term")
    options = options_of.parse_args(list(arguments))
    if not (options.ours or options.profile):
        require_transformers("step", ", or measure ours alone with --ours")
    settings = replace(trial_from(options), profile=options.profile)
    if not (options.ours or options.profile):
        rounds = dict.fromkeys(options.lengths, options.rounds)
        records = compare(
            {length: TWO_THREADS.get(length, 1.0) for length in options.lengths}, rounds, settings
        )
        publish("step", records[0]["detail"]["table"], {"settings": settings.settings(), "records": records})
        return show(records)
    every: dict[int, Runs] = {}
    for length in options.lengths:
        if options.terms:
            print_table(term_table(settings.config, length))
        found = [run_apart(replace(settings, tokens=length)) for _ in range(options.rounds)]
        every[length] = {"ours": found}
        for name, share in found[-1].get("profile", {}).items():
            print(f"{length}: {share:6.1%}  {name}")
    publish("step", table(every), {"settings": settings.settings(), "runs": every})
    return 0


def term_table(config: str, length: int) -> dict[str, Any]:
    """The operations of a step per token, and their sum."""
    found = terms(architecture(config), length)
    rows = [[term.name, f"{term.step / 1e6:.3f}"] for term in found]
    rows.append(["all", f"{sum(term.step for term in found) / 1e6:.3f}"])
    return {
        "columns": [f"{config}, {length:,} tokens", "MFLOP per token, forward and backward"],
        "rows": rows,
    }


def table(every: Mapping[int, Runs]) -> dict[str, Any]:
    """Medians by length and side."""
    rows = []
    for length, runs in every.items():
        for side, found in runs.items():
            speed, peak, flops, share = (
                median(found, name)
                for name in ("tokens_per_second", "peak_bytes", "flops_per_second", "share_of_matmul")
            )
            rows.append(
                [
                    f"{length:,}",
                    side,
                    f"{speed:,.0f}",
                    f"{peak / 2**20:,.0f}",
                    f"{flops / 1e9:,.1f}",
                    f"{share:.1%}",
                ]
            )
    return {"columns": list(COLUMNS), "rows": rows}


def median(found: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of one quantity over several runs."""
    return statistics.median(run[name] for run in found)


def _described(ours: Trial, experts: str, tried: dict[str, float]) -> dict[str, Any]:
    import transformers

    return {
        "transformers": transformers.__version__,
        "attention": "sdpa",
        "experts": experts,
        f"experts tried, tokens per CPU second at {TRIAL_TOKENS}": tried,
        "gradient checkpointing": True,
        "use_cache": False,
        "tile of ours": ours.tile,
        "recompute of ours": ours.recompute,
        "kernels of ours": ours.kernels,
        "threads": ours.threads,
        "dtype": ours.dtype,
    }


def _shown(
    length: int, recomputed: list[dict[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The same with recompute, which longer sequences need: no target of its own."""
    ratio = median(recomputed, "tokens_per_second") / median(theirs, "tokens_per_second")
    return {
        "name": f"speed at {length} tokens with recompute, multiple",
        "asked": "shown",
        "measured": ratio,
        "pass": True,
        "detail": {"runs": recomputed, "peak MiB": median(recomputed, "peak_bytes") / 2**20},
    }


def _records(length: int, asked: float, runs: Runs, settings: dict[str, Any]) -> list[dict[str, Any]]:
    speed = {side: median(found, "tokens_per_second") for side, found in runs.items()}
    cpu_speed = {side: median(found, "tokens_per_cpu_second") for side, found in runs.items()}
    peak = {side: median(found, "peak_bytes") for side, found in runs.items()}
    ratio = speed["ours"] / speed["transformers"]
    losses = [run["loss"] for found in runs.values() for run in found]
    same = max(losses) - min(losses) <= (1e-4 if settings["dtype"] == "float32" else 1e-2) * max(losses)
    return [
        {
            "name": f"speed at {length} tokens, multiple of transformers",
            "asked": asked,
            "measured": ratio,
            "pass": ratio >= asked and same,
            "detail": {
                "tokens per second": speed,
                "tokens per CPU second": cpu_speed,
                "settings": settings,
                "runs": runs,
            },
        },
        {
            "name": f"peak at {length} tokens, MiB (at most theirs)",
            "asked": round(peak["transformers"] / 2**20),
            "measured": round(peak["ours"] / 2**20),
            "pass": peak["ours"] < peak["transformers"],
        },
    ]
