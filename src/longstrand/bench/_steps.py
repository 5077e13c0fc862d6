"""The process of a trial: makes a model and a document, and times a training step of it."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from longstrand.architecture import Architecture
from longstrand.bench._profile import profile
from longstrand.bench._trial import Trial
from longstrand.config import DataSection, TrainSection
from longstrand.data import open_data
from longstrand.data.pack import Pack
from longstrand.model import Model, load_model
from longstrand.ops.native import use_native
from longstrand.peak_memory import PeakMemory, resident_bytes
from longstrand.plan.products import step_flops
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names
from longstrand.train.step import take_step

Step = Callable[[], float]  # its loss

MATMUL = 1024  # side of the square matrices that the machine is measured with
MATMUL_SECONDS = 0.5
TRAINED_REGION = "X:2118238-58582012"


def run(trial: Trial) -> dict[str, Any]:
    """Times the step after a short one, between two measurements of the machine's matmul rate."""
    torch.set_num_threads(trial.threads)
    native = use_native(trial.kernels if trial.side == "ours" else "portable")
    imported = resident_bytes()
    shape, dtype = architecture(trial.config), getattr(torch, trial.dtype)
    model = load_model(shape, dtype, seed=0)
    pack = human_pack(trial.fasta, trial.tokens) if trial.fasta else random_pack(trial.tokens)
    make = _optimizer_step if trial.optimizer else our_step
    make = their_step if trial.side == "transformers" else make
    # Long enough for every path: a second tile, and more pools than are selected.
    short = min(trial.tokens, 512 if trial.side == "transformers" else 2 * trial.tile + shape.index_topk)
    make(model, random_pack(short), trial)()
    gc.freeze()  # as train does before its first step
    before = matmul_rate(dtype)
    step = make(model, pack, trial)
    found: dict[str, Any] = {}
    if trial.profile:
        found["profile"] = profile(lambda: found.update(time_steps(step, trial)))
    else:
        found = time_steps(step, trial)
    rate = statistics.mean([before, matmul_rate(dtype)])
    flops = step_flops(shape, trial.tokens)
    return found | {
        "kernels": "native" if native.used else f"portable: {native.reason}",
        "after_import_bytes": imported,
        "flops_per_token": flops,
        "matmul_flops_per_second": rate,
        "flops_per_second": flops * found["tokens_per_second"],
        "share_of_matmul": flops * found["tokens_per_second"] / rate,
    }


def time_steps(step: Step, trial: Trial) -> dict[str, Any]:
    """Median seconds of the step, and the peak of this process while it runs."""
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    loss = 0.0
    with PeakMemory() as memory:
        memory.take()
        while not seconds or (sum(seconds) < trial.seconds and len(seconds) < trial.steps):
            started, used = time.perf_counter(), time.process_time()
            loss = step()
            seconds.append(time.perf_counter() - started)
            cpu_seconds.append(time.process_time() - used)
        peak = memory.take()
    return {
        "loss": loss,
        "seconds": seconds,
        "tokens_per_second": trial.tokens / statistics.median(seconds),
        "tokens_per_cpu_second": trial.tokens / statistics.median(cpu_seconds),  # of use on a busy machine
        "peak_bytes": peak,
    }


def our_step(model: Model, pack: Pack, trial: Trial) -> Step:
    """Forward and backward of the mean next-token loss, in tiles."""

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = -model.token_logprobs(pack, levers=trial.levers).sum() / (len(pack) - 1)
        loss.backward()
        return float(loss.detach())

    return step


def their_step(model: Model, pack: Pack, trial: Trial) -> Step:
    """The same in transformers: sdpa, no cache, gradient checkpointing, and our weights."""
    from longstrand.bench.oracle import Oracle

    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    oracle = Oracle(model.architecture, weights, getattr(torch, trial.dtype))
    oracle.model.set_attn_implementation("sdpa")
    oracle.model.set_experts_implementation(trial.experts)
    oracle.model.activation_checkpointing_enable()
    oracle.model.train()
    tokens = pack.tokens

    def step() -> float:
        oracle.model.zero_grad(set_to_none=True)
        oracle.head.grad = None
        state = oracle.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        loss = torch.nn.functional.cross_entropy(state[:-1] @ oracle.head.T, tokens[1:])
        loss.backward()
        return float(loss.detach())

    return step


def matmul_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a 1,024^3 product in this dtype: the median of half a second."""
    left, right = (torch.randn(MATMUL, MATMUL).to(dtype) for _ in range(2))
    return 2 * MATMUL**3 / median_seconds(lambda: left @ right, MATMUL_SECONDS)


def median_seconds(call: Callable[[], Any], total_seconds: float = 0.3) -> float:
    """Median of a call, repeated for `total_seconds` and at least three times, after one that is not counted."""
    call()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < total_seconds:
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def architecture(name: str) -> Architecture:
    """A shipped config."""
    return Architecture.from_hf(json.loads((files("longstrand") / "configs" / f"{name}.json").read_text()))


def random_pack(tokens: int, vocabulary: int = 256) -> Pack:
    """One document of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return Pack.from_documents([torch.randint(vocabulary, (tokens,), generator=generator)])


def human_pack(fasta: str, tokens: int) -> Pack:
    """The first sequence that a run on the short arm of human X would train on, read as a recipe reads it."""
    section = {"sources": [{"path": fasta, "regions": [TRAINED_REGION]}], "length": tokens}
    with tempfile.TemporaryDirectory() as cache:
        data = open_data(DataSection.model_validate(section), cache_dir=Path(cache))
        (pack,) = data.train_loader(1).next_step()
    if len(pack) != tokens:
        raise AssertionError(f"the first sequence has {len(pack)} tokens, not {tokens}")
    return pack


def _optimizer_step(model: Model, pack: Pack, trial: Trial) -> Step:
    """A whole step of training: forward, backward, gradient norm, clipping, AdamW."""
    settings = TrainSection(steps=1000, sequences_per_step=1, lr=1e-3)
    names = trained_names(model.groups(), settings)
    freeze_all_but(model, names)
    optimizer = Optimizer(model, names, settings)

    def step() -> float:
        result = take_step(
            model, [pack], optimizer, settings, step=optimizer.updates + 1, levers=trial.levers
        )
        assert result.loss is not None
        return result.loss

    return step


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(run(Trial(**json.loads(sys.argv[1])))))
