"""The memory figure: how much the peak of a training step grows per token, against what has to be kept.

Each length runs in its own process; the peak is the anonymous resident memory of that process and its descendants,
sampled every 20 ms, during one optimizer step of the toy in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

import torch

from longstrand.architecture import DSA, KDA, Architecture
from longstrand.bench.figures import show
from longstrand.config import TrainSection
from longstrand.data.pack import Pack
from longstrand.memory import Levers
from longstrand.memory.levers import streams_at_once
from longstrand.model import load_model
from longstrand.peak_memory import SOURCE, PeakMemory, resident_bytes
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names
from longstrand.train.step import take_step

LENGTHS = (16_384, 32_768, 65_536, 131_072)
TILE = 1024
FACTOR = 1.2


def bytes_per_token(
    shape: Architecture,
    element_bytes: int = 4,
    *,
    tile: int = TILE,
    keep_every: int = 1,
    offload: bool = False,
) -> dict[str, float]:
    """What a step has to keep for each token, by term; docs/memory.md explains each.

    Streams of R x D values for layer inputs (the first layer's is read from the token ids again) and one of D for the
    last mean, where no lever takes them away; what KDA hands over at a tile's border, shared by its tokens; pool ids of
    4 bytes and expert ids of 1 or 2; latents L and pool keys DI / kpool of one layer, and their float32 gradients.
    """
    stream = shape.hc_mult * shape.hidden_size * element_bytes
    at_once = streams_at_once(shape.num_hidden_layers, 0, keep_every)
    linear = shape.linear_num_heads * shape.linear_head_dim
    carry = (
        linear * shape.linear_head_dim * 4 + 3 * linear * (shape.linear_conv_kernel_dim - 1) * element_bytes
    )
    selecting = sum(
        kind == DSA and indexer == "full"
        for kind, indexer in zip(shape.layer_types, shape.indexer_types, strict=True)
    )
    routing = shape.mlp_layer_types.count("sparse")
    expert_bytes = 1 if shape.n_routed_experts <= 256 else 2
    return {
        "layer inputs": 0 if offload else at_once * stream,
        "last mean": 0 if offload else shape.hidden_size * element_bytes,
        "carries at tile borders": shape.layer_types.count(KDA) * carry / tile,
        "selected pools": selecting * shape.index_topk // shape.index_kpool * 4,
        "chosen experts": routing * shape.num_experts_per_tok * expert_bytes,
        "latents of one layer": shape.kv_lora_rank * element_bytes,
        "their gradient": shape.kv_lora_rank * 4,
        "pool keys and their gradient": shape.index_head_dim * (element_bytes + 4) / shape.index_kpool,
        "log-probabilities": 4,
    }


def toy() -> Architecture:
    """The toy's shape (K K K D, width 128, 1.2 M parameters)."""
    return Architecture.from_hf(json.loads((files("longstrand") / "configs" / "toy.json").read_text()))


def measure(lengths: Sequence[int] = LENGTHS, tile: int = TILE) -> list[dict[str, Any]]:
    """The growth of the peak from the first length to the last, per token."""
    found = [_measure_apart(length, tile) for length in lengths]
    terms = bytes_per_token(toy(), tile=tile)
    asked = FACTOR * sum(terms.values())
    first, last = found[0], found[-1]
    growth = (last["peak"] - first["peak"]) / (lengths[-1] - lengths[0])
    return [
        {
            "name": f"peak per token, {lengths[0]} to {lengths[-1]} tokens, bytes",
            "asked": asked,
            "measured": growth,
            "pass": growth <= asked,
            "detail": {
                "factor": FACTOR,
                "expression": sum(terms.values()),
                "terms": terms,
                "growth between neighbours": [
                    (more["peak"] - less["peak"]) / (more["tokens"] - less["tokens"])
                    for less, more in pairwise(found)
                ],
                "tile": tile,
                "runs": found,
                "peak is": SOURCE,
            },
        }
    ]


def measure_step(length: int, tile: int) -> dict[str, Any]:
    """Peak of one step of `length` tokens in this process, after a short one that made the optimizer's state."""
    imported = resident_bytes()
    model = load_model(toy())
    settings = TrainSection(steps=2, sequences_per_step=1, lr=1e-3)
    names = trained_names(model.groups(), settings)
    freeze_all_but(model, names)
    optimizer = Optimizer(model, names, settings)
    generator = torch.Generator().manual_seed(0)
    short, long = (
        Pack.from_documents([torch.randint(256, (size,), generator=generator)]) for size in (tile, length)
    )
    take_step(model, [short], optimizer, settings, step=1, levers=Levers(tile=tile))
    with PeakMemory() as memory:
        before = memory.take()
        result = take_step(model, [long], optimizer, settings, step=2, levers=Levers(tile=tile))
        peak = memory.take()
    return {
        "tokens": length,
        "after import": imported,
        "before the step": before,
        "peak": peak,
        "loss": result.loss,
    }


def main(arguments: list[str]) -> int:
    """`longstrand bench memory [LENGTH ...]`."""
    return show(measure(tuple(map(int, arguments)) or LENGTHS))


def _measure_apart(length: int, tile: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "longstrand.bench.memory", str(length), str(tile)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    print(f"{length} tokens: {found['peak'] / 2**20:.0f} MiB", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure_step(int(sys.argv[1]), int(sys.argv[2]))))
