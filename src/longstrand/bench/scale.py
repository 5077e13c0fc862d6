"""The figure of scaling: a step on two processes of one thread against one process of one thread.

    longstrand bench scale [--length 65536] [--rounds N]

The toy in float32 with its CPU kernels and one document of random tokens. A step is forward, backward and the reduction
of gradients, with the weights sharded. Runs alternate, in processes of their own, after a short step. With three
settings of `[memory]`, the same on both sides; the best of them counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longstrand.bench._arguments import command_line, parsed_count, parsed_length
from longstrand.bench._results import publish
from longstrand.bench._steps import architecture, random_pack
from longstrand.bench.figures import show
from longstrand.memory import Levers
from longstrand.model import Model, load_model
from longstrand.model.parallelize import parallelize
from longstrand.ops.native import use_native
from longstrand.parallel import Mesh, make_mesh, run_ranks
from longstrand.peak_memory import PeakMemory

TOKENS = 65_536
ROUNDS = 3
RANKS = 2
ASKED = 1.7
LOSS = 1e-5  # relative: how far the losses of all runs may be apart
SETTINGS = {
    "recompute = true": Levers(),
    "recompute = true, keep_fronts = true": Levers(keep_fronts=True),  # nothing to one process
    "recompute = false": Levers(recompute=False),
}
COLUMNS = (
    "[memory]",
    "processes",
    "seconds",
    "lowest to highest",
    "CPU seconds of each",
    "peak MiB of each",
    "times as fast",
)

Run = Mapping[str, Any]
"""`seconds` of the slowest rank; `cpu_seconds` and `peak_bytes` of each; `loss` of all."""


def measure() -> list[dict[str, Any]]:
    """At 65,536 tokens, the median of three."""
    return judge(TOKENS, ROUNDS)


def judge(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The best setting, then each."""
    runs: dict[str, dict[int, list[Run]]] = {name: {1: [], RANKS: []} for name in SETTINGS}
    for _ in range(rounds):
        for name, by_ranks in runs.items():
            for ranks, own in by_ranks.items():
                own.append(run(tokens, ranks, SETTINGS[name]))
    found = {name: compare(by_ranks) for name, by_ranks in runs.items()}
    rows = [row for name in SETTINGS for row in _rows(name, runs[name], found[name])]
    best = max(SETTINGS, key=lambda name: found[name]["speedup"])
    agree = all(each["loss_difference"] <= LOSS for each in found.values())
    whole = {
        "name": f"a step of {tokens:,} tokens: {RANKS} processes against one, times as fast",
        "asked": f">= {ASKED}",
        "measured": f"{found[best]['speedup']:.2f} ({best})",
        "pass": found[best]["speedup"] >= ASKED and agree,
        "detail": {"runs": runs, "table": {"columns": list(COLUMNS), "rows": rows}},
    }
    return [whole, *(_shown(name, found[name]) for name in SETTINGS)]


def compare(by_ranks: Mapping[int, Sequence[Run]]) -> dict[str, Any]:
    """One process against several: medians of seconds, and how far losses are apart."""
    one, many = (statistics.median(run["seconds"] for run in runs) for runs in by_ranks.values())
    losses = [run["loss"] for runs in by_ranks.values() for run in runs]
    cpu = [statistics.median(sum(run["cpu_seconds"]) for run in runs) for runs in by_ranks.values()]
    return {
        "speedup": one / many,
        "cpu_seconds_many_over_one": cpu[1] / cpu[0],
        "loss_difference": (max(losses) - min(losses)) / abs(losses[0]),
    }


def run(tokens: int, ranks: int, levers: Levers) -> Run:
    """One run, in processes of its own."""
    each = run_ranks(ranks, _timed, tokens, levers)
    return {
        "seconds": max(rank["seconds"] for rank in each),
        "cpu_seconds": [rank["cpu_seconds"] for rank in each],
        "peak_bytes": [rank["peak_bytes"] for rank in each],
        "loss": sum(rank["loss"] for rank in each),
    }


def _timed(tokens: int, levers: Levers) -> dict[str, float]:
    """Of one rank: a step after a short one; to be called on all."""
    torch.set_num_threads(1)
    use_native("auto")
    mesh = make_mesh(data=1, context=torch.distributed.get_world_size(), expert=1)
    model = parallelize(load_model(architecture("toy"), torch.float32, seed=0), mesh)
    # Long enough for every path: a second tile of each rank, and more pools than are selected.
    _step(model, mesh, min(tokens, mesh.context.size * 4096), levers)
    with PeakMemory() as memory:
        memory.take()
        torch.distributed.barrier()
        began, used = time.perf_counter(), time.process_time()
        loss = _step(model, mesh, tokens, levers)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - used
        peak = memory.take()
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak, "loss": loss}


def _step(model: Model, mesh: Mesh, tokens: int, levers: Levers) -> float:
    """This rank's part of the mean loss; gradients are reduced on the way back."""
    model.zero_grad(set_to_none=True)
    loss = -model.token_logprobs(random_pack(tokens), levers=levers).sum() / (tokens - 1)
    loss.backward()
    return float(loss.detach())


def _shown(name: str, found: dict[str, Any]) -> dict[str, Any]:
    speedup = f"{found['speedup']:.2f}"
    return {
        "name": f"the same with {name}",
        "asked": "shown",
        "measured": speedup,
        "pass": True,
        "detail": found,
    }


def _rows(name: str, runs: Mapping[int, Sequence[Run]], found: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for ranks, own in runs.items():
        seconds = sorted(run["seconds"] for run in own)
        cpu = [statistics.median(each) for each in zip(*(run["cpu_seconds"] for run in own), strict=True)]
        peak = [statistics.median(each) for each in zip(*(run["peak_bytes"] for run in own), strict=True)]
        rows.append(
            [
                name,
                str(ranks),
                f"{statistics.median(seconds):.2f}",
                f"{seconds[0]:.2f} to {seconds[-1]:.2f}",
                ", ".join(f"{each:.2f}" for each in cpu),
                ", ".join(f"{each / 2**20:,.0f}" for each in peak),
                "" if ranks == 1 else f"{found['speedup']:.2f}",
            ]
        )
    return rows


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench scale`."""
    options_of = command_line("scale", __doc__)
    options_of.add_argument(
        "--length", type=parsed_length, default=TOKENS, help="the verdict is given at the default"
    )
    options_of.add_argument("--rounds", type=parsed_count, default=ROUNDS, help="of alternating runs")
    options = options_of.parse_args(list(arguments))
    torch.set_num_threads(1)
    records = judge(options.length, options.rounds)
    publish("scale", records[0]["detail"]["table"], {"records": records})
    return show(records) if options.length == TOKENS else 0
