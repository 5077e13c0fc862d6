"""Whether certify catches known faults of training on many ranks, and says where they are.

longstrand bench caught
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from longstrand.bench import _faults as faults
from longstrand.bench._arguments import command_line
from longstrand.bench.figures import show
from longstrand.checks.certificate import Certificate
from longstrand.checks.certify import NAMES, certify
from longstrand.config import Recipe

TOKENS = 128
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "vocab_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
    "hc_sinkhorn_iters": 5,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
}


@dataclass(frozen=True)
class Fault:
    """A fault, the check that must fail first, and the place that it must name."""

    put: Callable[[], faults.Context]
    check: str
    where: str


FAULTS: dict[str, Fault] = {
    "no halo before a convolution": Fault(
        partial(faults.no_halo, "KDA convolution inputs"), "ranks", "layer 0 (KDA), forward"
    ),
    "no halo before pools": Fault(partial(faults.no_halo, "DSA halo"), "ranks", "layer 1 (DSA), forward"),
    "states not scanned": Fault(faults.states_not_scanned, "ranks", "layer 0 (KDA), forward"),
    "state gradients not scanned": Fault(
        faults.state_gradients_not_scanned, "ranks", "layer 2 (KDA), backward"
    ),
    "a row offset in selection": Fault(faults.row_offset, "ranks", "layer 1 (DSA), forward"),
    "a mean of means": Fault(faults.mean_of_means, "ranks", "the loss"),
    "experts' gradients times ranks": Fault(
        faults.experts_times_ranks, "ranks", "gradients of experts of layers 1, 2, 3"
    ),
    "a norm of own rows": Fault(faults.local_norm, "ranks", "the norm of the gradients"),
    "a layer not reduced": Fault(
        partial(faults.layer_not_reduced, 2), "ranks", "gradients of all groups of layer 2 (KDA)"
    ),
    "labels shifted after sharding": Fault(
        faults.labels_after_sharding, "ranks", "the log-probabilities: the head, the last norm or the targets"
    ),
    "experts chosen again": Fault(faults.chosen_again, "levers", "layer 3 (DSA), backward"),
}


def certified(folder: Path, fault: Fault | None = None, only: Collection[str] = NAMES) -> Certificate:
    """A certificate of a small recipe, context 2 x expert 2: in float32, or with a fault in the product in float64."""
    if fault is None:
        return certify(small_recipe(folder), tokens=TOKENS, start="fork", only=only)
    with fault.put():
        return certify(small_recipe(folder, "float64"), tokens=TOKENS, start="fork", only=only)


def small_recipe(folder: Path, dtype: str = "float32") -> Recipe:
    """Four layers with experts, and packs of several documents; its files are in the folder."""
    toy = json.loads(files("longstrand").joinpath("configs/toy.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(toy | SIZES))
    drawn = random.Random(1)
    records = ("".join(drawn.choices("ACGT", k=drawn.randint(20, 90))) for _ in range(12))
    (folder / "some.fa").write_text(
        "".join(f">{number}\n{letters}\n" for number, letters in enumerate(records))
    )
    return Recipe.model_validate(
        {
            "run": {"out": str(folder / "run"), "threads": 1, "dtype": dtype},
            "model": {"config": str(folder / "config.json")},
            "data": {
                "length": 128,
                "cache": str(folder / "cache"),
                "sources": [{"path": str(folder / "some.fa")}],
            },
            "train": {"steps": 4, "lr": 1e-3, "indexer": "sparse", "balance": "bias"},
            "memory": {"tile": 16},
            "parallel": {"context": 2, "expert": 2},
        }
    )


def measure(names: Sequence[str] = tuple(FAULTS)) -> list[dict[str, Any]]:
    """One record per fault, and one without any, which must pass."""
    with tempfile.TemporaryDirectory() as folder:
        plain = certified(Path(folder))
    records = [
        {
            "name": "no fault",
            "asked": "a certificate",
            "measured": "passes" if plain.passed else plain.failure,
            "pass": plain.passed,
            "detail": {"checks": [check.as_dict() for check in plain.checks]},
        }
    ]
    return records + [_record(name) for name in names]


def _record(name: str) -> dict[str, Any]:
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory() as folder:
        found = certified(Path(folder), fault)
    failed = [check for check in found.checks if not check.passed]
    asked = f"{fault.check}: {fault.where}"
    measured = f"{failed[0].name}: {failed[0].difference.where}" if failed else "not caught"
    return {
        "name": name,
        "asked": asked,
        "measured": measured,
        "pass": asked == measured,
        "detail": {"failed": [check.as_dict() for check in failed]},
    }


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench caught`."""
    command_line("caught", __doc__).parse_args(list(arguments))
    torch.set_num_threads(1)
    return show(measure())
