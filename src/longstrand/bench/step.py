"""The speed figure: one training step of the toy, ours against transformers' text model alone.

Both have the same weights and tokens, one thread and float32, and run in processes of their own that alternate. A
step is forward and backward of the mean loss of next tokens; the optimizer, the same on both sides, is left out.

    longstrand bench step [LENGTH ...] [--rounds N] [--ours]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from longstrand.bench.figures import show
from longstrand.bench.memory import toy
from longstrand.data.pack import Pack
from longstrand.model import Model, load_model
from longstrand.peak_memory import PeakMemory, resident_bytes

Side = Literal["ours", "transformers"]

TARGETS = {4096: 8.0, 8192: 20.0}  # length -> at least this many times the oracle's tokens per second
ROUNDS = 3
TILE = 1024
EXPERTS = ("eager", "grouped_mm", "batched_mm")
TRIAL_TOKENS = 1024  # on which transformers' ways to compute experts are compared
TIMED_SECONDS, TIMED_STEPS = 10.0, 5  # a process repeats the step until one of the two is reached


def measure(lengths: Sequence[int] = tuple(TARGETS), rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Two records per length: tokens per second as a multiple of the oracle's, and peak memory beside its."""
    settings = _settings()
    records = []
    for length in lengths:
        runs: dict[Side, list[dict[str, Any]]] = {"ours": [], "transformers": []}
        for _ in range(rounds):
            runs["ours"].append(_measure_apart("ours", length))
            runs["transformers"].append(_measure_apart("transformers", length, settings["experts"]))
        records += _records(length, runs, settings)
    return records


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench step`."""
    parser = argparse.ArgumentParser(prog="longstrand bench step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("lengths", type=int, nargs="*", default=list(TARGETS), metavar="LENGTH")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--ours", action="store_true", help="without transformers: tokens per second and peak"
    )
    options = parser.parse_args(list(arguments))
    if not options.ours:
        return show(measure(options.lengths, options.rounds))
    for length in options.lengths:
        found = [_measure_apart("ours", length) for _ in range(options.rounds)]
        speed, peak = _median(found, "tokens_per_second"), _median(found, "peak_bytes")
        print(f"{length} tokens: {speed:,.0f} tokens/s, peak {peak / 2**20:,.0f} MiB")
    return 0


def time_steps(step: Callable[[], Tensor], length: int) -> dict[str, Any]:
    """Median seconds of the step, and the peak of this process while it runs."""
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    loss = 0.0
    with PeakMemory() as memory:
        memory.take()
        while not seconds or (sum(seconds) < TIMED_SECONDS and len(seconds) < TIMED_STEPS):
            started, used = time.perf_counter(), time.process_time()
            loss = float(step())
            seconds.append(time.perf_counter() - started)
            cpu_seconds.append(time.process_time() - used)
        peak = memory.take()
    return {
        "loss": loss,
        "seconds": seconds,
        "tokens_per_second": length / statistics.median(seconds),
        "tokens_per_cpu_second": length / statistics.median(cpu_seconds),  # of use on a busy machine
        "peak_bytes": peak,
    }


def our_step(model: Model, tokens: Tensor) -> Callable[[], Tensor]:
    """Forward and backward of the mean next-token loss, in tiles."""
    pack = Pack.from_documents([tokens])

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = -model.token_logprobs(pack, tile=TILE).sum() / (len(tokens) - 1)
        loss.backward()
        return loss.detach()

    return step


def their_step(model: Model, tokens: Tensor, experts: str) -> Callable[[], Tensor]:
    """The same in transformers: sdpa, no cache, gradient checkpointing, and our weights."""
    from longstrand.bench.oracle import Oracle

    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    oracle = Oracle(model.architecture, weights, torch.float32)
    oracle.model.set_attn_implementation("sdpa")
    oracle.model.set_experts_implementation(experts)
    oracle.model.activation_checkpointing_enable()
    oracle.model.train()

    def step() -> Tensor:
        oracle.model.zero_grad(set_to_none=True)
        oracle.head.grad = None
        state = oracle.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        loss = torch.nn.functional.cross_entropy(state[:-1] @ oracle.head.T, tokens[1:])
        loss.backward()
        return loss.detach()

    return step


def _child(side: Side, length: int, experts: str) -> dict[str, Any]:
    """In a process of its own: a short step first, then the timed ones."""
    imported = resident_bytes()
    model = load_model(toy(), seed=0)
    tokens = torch.randint(256, (length,), generator=torch.Generator().manual_seed(0))
    make = our_step if side == "ours" else lambda m, t: their_step(m, t, experts)
    make(model, tokens[:512])()
    return time_steps(make(model, tokens), length) | {"after_import_bytes": imported}


def _measure_apart(side: Side, length: int, experts: str = "") -> dict[str, Any]:
    command = [sys.executable, "-m", "longstrand.bench.step", side, str(length), experts]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    speed, cpu_speed = round(found["tokens_per_second"]), round(found["tokens_per_cpu_second"])
    more = f"({cpu_speed} per CPU second), {found['peak_bytes'] / 2**20:,.0f} MiB {experts}"
    print(f"{side} at {length}: {speed} tokens/s {more}", file=sys.stderr, flush=True)
    return found


def _settings() -> dict[str, Any]:
    """transformers' settings, with its fastest way to compute experts on this machine."""
    import transformers

    trials = {e: _measure_apart("transformers", TRIAL_TOKENS, e)["tokens_per_cpu_second"] for e in EXPERTS}
    return {
        "transformers": transformers.__version__,
        "attention": "sdpa",
        "experts": max(trials, key=lambda name: trials[name]),
        f"experts tried, tokens per CPU second at {TRIAL_TOKENS}": trials,
        "gradient checkpointing": True,
        "use_cache": False,
        "tile of ours": TILE,
        "threads": 1,
        "dtype": "float32",
    }


def _records(
    length: int, runs: dict[Side, list[dict[str, Any]]], settings: dict[str, Any]
) -> list[dict[str, Any]]:
    speed = {side: _median(found, "tokens_per_second") for side, found in runs.items()}
    cpu_speed = {side: _median(found, "tokens_per_cpu_second") for side, found in runs.items()}
    peak = {side: _median(found, "peak_bytes") for side, found in runs.items()}
    ratio = speed["ours"] / speed["transformers"]
    asked = TARGETS.get(length, 1.0)
    losses = [run["loss"] for found in runs.values() for run in found]
    return [
        {
            "name": f"speed at {length} tokens, multiple of transformers",
            "asked": asked,
            "measured": ratio,
            "pass": ratio >= asked and max(losses) - min(losses) <= 1e-4 * max(losses),
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


def _median(found: list[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps(_child("ours" if sys.argv[1] == "ours" else "transformers", int(sys.argv[2]), sys.argv[3]))
    )
