"""Hyper-connections: the hand-written backward against autograd over the formulas."""

import pytest
import torch
from agreement import agrees, is_as_exact_as_plain_torch
from torch import Tensor

from longstrand.ops.mhc import mhc_gather, mhc_gather_reference, mhc_update, mhc_update_reference
from longstrand.ops.mhc.cases import CASES, MhcCase, draw, settings


def gather(case):
    return lambda **inputs: mhc_gather(**inputs, **settings(case))


def gather_definition(case):
    return lambda **inputs: mhc_gather_reference(**inputs, **settings(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gather_is_the_definition(case):
    agrees(gather(case), gather_definition(case), draw(case), limit=1e-11)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gather_in_float32_is_as_exact_as_plain_torch(case):
    is_as_exact_as_plain_torch(gather(case), gather_definition(case), draw(case), floor=16.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_update_is_the_definition(case):
    agrees(mhc_update, mhc_update_reference, _update_inputs(case))


def test_update_in_bfloat16_is_as_exact_as_plain_torch():
    inputs = _update_inputs(MhcCase("", length=37))
    is_as_exact_as_plain_torch(mhc_update, mhc_update_reference, inputs, torch.bfloat16)


def test_comb_is_applied_transposed():
    """A cyclic shift: stream j of the input lands in stream j + 1 (R12)."""
    shift = torch.eye(4, dtype=torch.float64).roll(1, dims=1).expand(3, 4, 4)  # comb[j, j + 1] = 1
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    zero = torch.zeros(3, 5, dtype=torch.float64)
    moved = mhc_update(x, zero, torch.ones(3, 4, dtype=torch.float64), shift)
    assert torch.equal(moved, x.roll(1, dims=1))


def test_an_asymmetric_mix_gives_what_transformers_gives_stream_by_stream():
    from transformers.models.glm5_next import modeling_glm5_next as transformers

    from longstrand.bench.oracle import Widened

    case = MhcCase("", length=9, width=6, spread=3.0)
    inputs = draw(case)
    config = type("Config", (), {"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-5})
    config.hidden_size = 6
    theirs = transformers.Glm5NextTextHyperConnection(config).double()
    theirs.load_state_dict({name: inputs[name] for name in ("fn", "base", "scale")})
    out = torch.randn(9, 6, dtype=torch.float64)
    with Widened():
        post, comb, h = theirs(inputs["x"][None])
        streams = post[0].unsqueeze(-1) * out.unsqueeze(1) + comb[0].mT @ inputs["x"]
    ours_h, ours_post, ours_comb = mhc_gather(**inputs, **settings(case))
    assert torch.allclose(ours_h, h[0], rtol=0, atol=1e-12)
    assert torch.allclose(mhc_update(inputs["x"], out, ours_post, ours_comb), streams, rtol=0, atol=1e-12)
    assert not torch.allclose(ours_comb, ours_comb.mT, atol=0.1)


def test_comb_has_columns_that_sum_to_one_and_rows_that_nearly_do():
    case = MhcCase("", length=11)
    _, _, comb = mhc_gather(**draw(case), **settings(case))
    assert torch.allclose(comb.sum(-2), torch.ones(11, 4, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(comb.sum(-1), torch.ones(11, 4, dtype=torch.float64), atol=1e-3)


def test_frozen_coefficients_receive_no_gradient_and_streams_still_do():
    case = MhcCase("")
    inputs = draw(case)
    inputs["x"].requires_grad_()
    sum(part.sum() for part in mhc_gather(**inputs, **settings(case))).backward()
    frozen = inputs["x"].grad
    trained = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    sum(part.sum() for part in mhc_gather(**trained, **settings(case))).backward()
    assert torch.equal(frozen, trained["x"].grad)


def _update_inputs(case: MhcCase) -> dict[str, Tensor]:
    inputs = draw(case)
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": inputs["x"],
        "out": noise(case.length, case.width),
        "post": noise(case.length, case.streams),
        "comb": noise(case.length, case.streams, case.streams),
    }
