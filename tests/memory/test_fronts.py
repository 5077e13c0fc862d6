"""What the first half of a tile's graph keeps, in bytes of living tensors, and what the planner says of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from live_tensors import LiveTensors

from longstrand.bench._small_models import architecture, model
from longstrand.config import ParallelSection
from longstrand.memory.tiles import PackLayout
from longstrand.model.dsa_front import DsaFront
from longstrand.model.kda_passage import KdaFront
from longstrand.plan.job import Job
from longstrand.plan.ops import Settings
from longstrand.plan.shared_layers import SharedLayerTape
from longstrand.plan.sizes import POSITIONS

SHAPES = [
    {},
    {"hidden_size": 32, "hc_sinkhorn_iters": 9},
    {"hc_mult": 2, "kv_lora_rank": 16},
    {"linear_head_dim": 16, "linear_num_heads": 4},
]


def front_of(layer, x):
    """The front of a tile in the middle of a document, as it is kept between a layer's two stages."""
    layout = PackLayout(torch.tensor([0, 2048]), layer.shape.index_kpool, torch.device("cpu"))
    tile, carry = layout.tile(1024, 1024 + len(x)), layer.start(layout)
    with torch.enable_grad():
        if hasattr(carry, "state"):
            front = KdaFront(layer, x, tile, carry.tail)
            front.recur(carry.state)
            return front
        return DsaFront(layer, x, tile, carry, layer.open(carry))


def live_bytes(layer, dtype, num_tokens):
    x = torch.randn(num_tokens, *stream(layer)).to(dtype)
    with LiveTensors() as live:
        front = front_of(layer, x)
    assert front is not None
    return live.live


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_fronts_keep_what_is_planned(changes, dtype):
    """With the gradients of what follows them, and without that of the input."""
    name: Any = str(dtype).removeprefix("torch.")
    job = Job(architecture("KD", **changes), 4096, dtype=name, parallel=ParallelSection(context=2))
    settings = replace(Settings.of(job), begins=False)
    for index, layer in enumerate(model("KD", dtype=dtype, **changes).layers):
        growth = live_bytes(layer, dtype, 384) - live_bytes(layer, dtype, 256)
        _, *leaves = front_of(layer, torch.randn(128, *stream(layer)).to(dtype)).leaves
        few, many = (
            SharedLayerTape(settings, index, tokens).to_the_middle(keeps_front=True).left
            for tokens in (256, 384)
        )
        held = growth - POSITIONS * 128 + sum(leaf.nbytes for leaf in leaves)
        assert many - few == held


def stream(layer):
    return layer.shape.hc_mult, layer.shape.hidden_size


def test_gradients_in_the_middle_are_those_of_the_layout():
    """Without the input's own, which has a stream: D e + 4 (R + R^2), and 4 H V of the recurrence's output."""
    dtype = torch.bfloat16
    for layer, inner in zip(model("KD", dtype=dtype).layers, (16, 0), strict=True):
        _, *leaves = front_of(layer, torch.randn(32, 4, 16).to(dtype)).leaves
        assert sum(leaf.nbytes for leaf in leaves) == 32 * (16 * 2 + (4 + 16 + inner) * 4)
