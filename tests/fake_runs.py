"""Run folders with known content, as `train` writes them, without any training."""

import json
import math
from pathlib import Path

import numpy as np

from longstrand.buckets import BucketSums, default_edges
from longstrand.series import append_series, series_from

RECIPE = """\
[run]
out = "runs/demo"
seed = 0
dtype = "float32"

[model]
path = "checkpoints/toy"

[data]
tokenizer = "bases"
length = {length}

[[data.sources]]
path = "resfinder_alleles.fa.gz"
weight = 1.0

[data.families]
kmer = 31
order = "relatives"

[data.split]
by = "family"

[train]
steps = {steps}
sequences_per_step = 4
lr = 0.001

[memory]
tile = 1024

[evaluate]
split = "held_out"
control = true

[report]
title = "{title}"
"""

KERNELS = {
    "kda": {"implementation": "chunked", "why": "portable; float32 on a CPU"},
    "select": {"implementation": "blockwise", "why": "portable"},
    "sparse_attention": {"implementation": "gathered", "why": "portable"},
    "mhc": {"implementation": "fused", "why": "hand-written backward"},
}

PART = {
    "letters": 310782,
    "records": 332,
    "tokens": 310782,
    "documents": 19,
    "longer_than_length_cut_into_windows": 0,
    "trained_per_epoch": 308000,
    "masked_per_epoch": {"n": 1217, "lower_case": 0, "not_supervised": 0},
    "first_tokens": 19,
    "skipped": {"too_few_relatives": {"documents": 190, "tokens": 171002}},
}

LEDGER = {
    "version": 1,
    "policies": {"tokenizer": "bases", "case": "ignore", "n": "mask", "families": {"kmer": 31}},
    "families": {"families": 513, "single_records": 190, "largest": {"records": 201, "letters": 180201}},
    "sources": [
        {
            "path": "resfinder_alleles.fa.gz",
            "format": "fasta",
            "weight": 1.0,
            "files": [
                {"path": "resfinder_alleles.fa.gz", "records": 3153, "letters": {"A": 700000, "N": 1203}}
            ],
            "letters": 2902113,
            "outside_regions": 0,
            "named_by_several_regions": 0,
            "read_as_n": {"R": 9, "Y": 5},
            "split": {"train": {**PART, "skipped": {}}, "held_out": PART},
            "shown_in_training": {
                "sequences": 1600,
                "documents": 1600,
                "tokens": 26214400,
                "trained": 26212800,
            },
        }
    ],
}


def write_run(
    folder: Path, *, steps: int = 400, of: int | None = None, length: int = 16384, title: str = ""
) -> Path:
    """A run folder with everything but an evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    title = title or "Copying from relatives: 16k tokens of resistance genes"
    (folder / "run.toml").write_text(RECIPE.format(length=length, steps=of or steps, title=title))
    (folder / "kernels.json").write_text(json.dumps(KERNELS))
    (folder / "data.json").write_text(json.dumps(LEDGER))
    generator = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss = 0.55 + 0.8 * math.exp(-3.5 * step / steps) + generator.normal(0, 0.03)
            record = {
                "step": step,
                "loss": loss,
                "tokens": 4 * length - 4,
                "lr": 1e-3 * min(1, step / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
                "grad_norm": float(generator.gamma(6, 0.12)),
                "tokens_per_second": float(generator.normal(4070, 60)),
                "seconds": 16.1,
                "peak_memory_bytes": int(1.4e9 + 2e7 * generator.random()),
                "remaining_seconds": 16.1 * (steps - step),
                "expert_load_max_over_mean": float(1.4 + 0.2 * generator.random()),
            }
            file.write(json.dumps(record) + "\n")
    return folder


def add_series(
    folder: Path,
    name: str,
    step: int,
    nats: list[float],
    edges: list[int],
    *,
    sequences: int = 16,
    seed: int = 0,
) -> None:
    """Appends a series whose bucket means are about `nats`; the same seed gives the same sequences."""
    generator = np.random.default_rng(seed)
    width = np.diff(edges).astype(float)
    difficulty = np.exp(generator.normal(0, 0.06, (sequences, len(width))))
    noise = np.exp(np.random.default_rng(seed + 1 + step).normal(0, 0.03, (sequences, len(width))))
    weight = np.broadcast_to(width, (sequences, len(width))).copy()
    sums = BucketSums(
        edges=tuple(edges),
        ids=tuple(f"{seed:04x}{number:08x}" for number in range(sequences)),
        weight=weight,
        nats=weight * np.array(nats) * difficulty * noise,
        tokens=tuple(int(w) * sequences for w in width),
        masked=1217,
        beyond=0,
    )
    append_series(folder, series_from(sums, name, step))


def write_demo(
    folder: Path, *, buckets: int = 5, steps: int = 400, gains: str = "context", sequences: int = 16
) -> Path:
    """A finished run with all four series; gains: "context", "everywhere", "negative" or "none"."""
    edges = default_edges(16384) if buckets == 5 else default_edges(524288, 524288 // buckets)
    if buckets == 6:
        edges = default_edges(32768)
    write_run(folder, steps=steps, length=edges[-1])
    depth = np.linspace(0, 1, len(edges) - 1)
    before = 1.32 - 0.02 * depth
    change = {
        "context": 0.01 + 0.62 * depth**1.2,
        "everywhere": 0.06 + 0 * depth,
        "negative": -0.03 - 0.08 * depth,
        "none": 0 * depth,
    }[gains]
    strangers = 0.02 + 0.01 * depth
    for name, step, nats, seed in (
        ("before", 0, before, 0),
        ("after", steps, before * (1 - change), 0),
        ("control before", 0, before + 0.03, 9),
        ("control after", steps, (before + 0.03) * (1 - strangers), 9),
    ):
        add_series(folder, name, step, list(nats), edges, sequences=sequences, seed=seed)
    return folder


MIB = 2**20


def add_plan(folder: Path, *, counted: bool = True) -> None:
    """plan.json and memory.json: 40 MiB at the start, 300 MiB planned and 310 counted in backward; 15 s a step."""
    (folder / "plan.json").write_text(json.dumps(_plan()))
    (folder / "memory.json").write_text(json.dumps(_memory(counted=counted)))


def _plan() -> dict:
    static = [_term("weights", 10), _term("moments", 30)]
    many = [_term(f"small {number}", 1) for number in range(1, 9)]
    phases = {
        "start": static,
        "forward": [*static, _term("layer inputs", 160)],
        "backward": [*static, _term("layer inputs", 160), _term("a tile in work", 92), *many],
        "optimizer": [*static, _term("gradients", 10)],
    }
    guessed, found = "estimated: 80%, because of a guess", "measured: 0.5 x the estimate"
    seconds = [
        {"name": "projections", "seconds": 9.0, "why": "5 MFLOP", "evidence": guessed},
        {"name": "scores", "seconds": 6.0, "why": "2 MFLOP", "evidence": found},
    ]
    return {
        "version": 1,
        "device": "CPU",
        "memory": {"phases": phases, "elsewhere": [_term("spool", 500, "file")]},
        "seconds": {"total": 15.0, "terms": seconds},
        "problems": [],
    }


def _term(name: str, size: int, place: str = "device") -> dict:
    evidence = "measured: living tensors, counted on a CPU (docs/planner.md)"
    of = {"name": name, "num_bytes": size * MIB, "place": place}
    return of | {"why": f"{name} <of> it", "evidence": evidence}


def _memory(*, counted: bool) -> dict:
    """The process took 200 MiB and 1 of tensors before; twice as much as is counted becomes resident."""
    peaks = {"start": 42, "forward": 190, "backward": 310, "optimizer": 50, "evaluate": 120, "save": 45}
    taken = {"seconds": 100.0, "cpu_seconds": 90.0, "times": 10}

    def held(peak: int) -> dict:
        return {
            "resident_bytes": (200 + 2 * peak) * MIB,
            "counted_bytes": (1 + peak) * MIB if counted else None,
        }

    return {
        "version": 1,
        "ranks": 1,
        "not_counted": None if counted else "no compiler",
        "baseline": held(0),
        "phases": {name: held(peak) | taken for name, peak in peaks.items()},
    }
