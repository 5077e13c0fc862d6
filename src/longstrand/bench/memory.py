"""The memory figure: how much the peak of a training step grows per token, against what has to be kept.

Each length runs in its own process; the peak is the anonymous resident memory of that process and its descendants,
sampled every 20 ms, during one whole step (optimizer too) of the toy in float32, with the kernels that training takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from longstrand.architecture import DSA, KDA, Architecture
from longstrand.bench._arguments import command_line, parsed_length
from longstrand.bench._steps import architecture
from longstrand.bench._trial import Trial, run_apart
from longstrand.bench.figures import show
from longstrand.memory.levers import streams_at_once
from longstrand.peak_memory import SOURCE

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


def measure(lengths: Sequence[int] = LENGTHS, tile: int = TILE) -> list[dict[str, Any]]:
    """The growth of the peak from the first length to the last, per token."""
    settings = Trial(0, threads=1, tile=tile, optimizer=True, steps=1)
    runs = [run_apart(replace(settings, tokens=length)) for length in lengths]
    terms = bytes_per_token(architecture("toy"), tile=tile)
    asked, growth = FACTOR * sum(terms.values()), _growth(runs[0], runs[-1])
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
                "growth between neighbours": [_growth(less, more) for less, more in pairwise(runs)],
                "settings": settings.settings(),
                "runs": runs,
                "peak is": SOURCE,
            },
        }
    ]


def _growth(less: Mapping[str, Any], more: Mapping[str, Any]) -> float:
    return (more["peak_bytes"] - less["peak_bytes"]) / (more["tokens"] - less["tokens"])


def main(arguments: list[str]) -> int:
    """`longstrand bench memory [LENGTH ...]`."""
    options_of = command_line("memory", __doc__)
    options_of.add_argument("lengths", type=parsed_length, nargs="*", default=list(LENGTHS), metavar="LENGTH")
    lengths = options_of.parse_args(arguments).lengths
    if len(lengths) < 2:
        options_of.error("the growth needs two lengths or more")
    return show(measure(lengths))
