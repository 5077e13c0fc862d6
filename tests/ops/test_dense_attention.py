"""Dense attention block by block against softmax row by row."""

import pytest
import torch

from longstrand.ops.dense_attention import blockwise, dense_attention, dense_attention_reference, pool_masses
from longstrand.ops.dense_attention.cases import CASES, draw

SCALE = 0.37


def blocks_and_definition(case, dtype=torch.float64):
    inputs = {n: v.to(dtype) if v.is_floating_point() else v for n, v in draw(case).items()}
    given = {"kpool": case.kpool, "scale": SCALE}
    attention = dense_attention(**inputs, **given)
    shares = torch.zeros(len(inputs["q"]), len(inputs["latents"]) // case.kpool, dtype=dtype)
    rows = inputs["q"], inputs["latents"], inputs["first_pool"], inputs["num_visible"]
    for pools, share in pool_masses(*rows, attention, **given):
        shares[:, pools] = share
    wide = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items() if n != "num_visible"}
    return attention, shares, *dense_attention_reference(**wide, **given)


@pytest.mark.parametrize("block", [1, 2, 256])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_are_the_definition(case, block, monkeypatch):
    monkeypatch.setattr(blockwise, "POOL_BLOCK", block)
    attention, shares, out, wanted = blocks_and_definition(case)
    assert torch.allclose(attention.out, out, rtol=0, atol=1e-12)
    assert torch.allclose(shares, torch.nan_to_num(wanted), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_exact_to_rounding(case):
    attention, shares, out, wanted = blocks_and_definition(case, torch.float32)
    assert torch.allclose(attention.out.double(), out, rtol=1e-5, atol=1e-4)
    assert torch.allclose(shares.double(), torch.nan_to_num(wanted), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_shares_sum_to_one_where_a_pool_is_complete_and_are_zero_elsewhere(case):
    _, shares, _, _ = blocks_and_definition(case)
    complete = draw(case)["num_visible"] > 0
    assert torch.allclose(shares.sum(-1), complete.double())
