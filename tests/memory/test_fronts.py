"""What the first half of a tile's graph keeps, in bytes of living tensors: the expressions of KdaFront and DsaFront."""

import pytest
import torch
from live_tensors import LiveTensors

from longstrand.bench._small_models import model
from longstrand.memory.tiles import PackLayout
from longstrand.model.dsa_front import DsaFront
from longstrand.model.kda_passage import KdaFront

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
    x = torch.randn(num_tokens, layer.shape.hc_mult, layer.shape.hidden_size).to(dtype)
    with LiveTensors() as live:
        front = front_of(layer, x)
    assert front is not None
    return live.live


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_fronts_keep_what_is_written(changes, dtype):
    for layer, kind in zip(model("KD", dtype=dtype, **changes).layers, (KdaFront, DsaFront), strict=True):
        growth = (live_bytes(layer, dtype, 384) - live_bytes(layer, dtype, 256)) / 128
        assert growth == kind.bytes_per_token(layer, dtype.itemsize, 4)


def test_gradients_in_the_middle_are_those_of_the_layout():
    """Without the input's own, which has a stream: D e + 4 (R + R^2), and 4 H V of the recurrence's output."""
    dtype = torch.bfloat16
    for layer, inner in zip(model("KD", dtype=dtype).layers, (16, 0), strict=True):
        _, *leaves = front_of(layer, torch.randn(32, 4, 16).to(dtype)).leaves
        assert sum(leaf.nbytes for leaf in leaves) == 32 * (16 * 2 + (4 + 16 + inner) * 4)
