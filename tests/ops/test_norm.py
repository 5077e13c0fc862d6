"""The norms against autograd over their formulas."""

import pytest
import torch
from agreement import agrees, is_as_exact_as_plain_torch

from longstrand.ops.norm import gated_rms_norm, rms_norm

SIZES = {"x": 1.0, "tiny": 1e-3, "large": 1e4}


def inputs(size, *shape):
    generator = torch.Generator().manual_seed(3)
    x = size * torch.randn(*shape, generator=generator, dtype=torch.float64)
    weight = 1 + 0.3 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    return {"x": x, "weight": weight}


def definition(x, weight):
    return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 9)], ids=str)
def test_rms_norm_is_the_formula_with_the_epsilon_inside_the_root(size, shape):
    agrees(lambda x, weight: rms_norm(x, weight, 1e-5), definition, inputs(size, *shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_as_exact_as_plain_torch(dtype):
    is_as_exact_as_plain_torch(
        lambda x, weight: rms_norm(x, weight, 1e-5), definition, inputs(1.0, 37, 19), dtype
    )


def test_the_gated_norm_multiplies_with_a_sigmoid():
    generator = torch.Generator().manual_seed(4)
    given = inputs(1.0, 5, 3, 7) | {"gate": torch.randn(5, 3, 7, generator=generator, dtype=torch.float64)}
    agrees(
        lambda x, weight, gate: gated_rms_norm(x, gate, weight, 1e-5),
        lambda x, weight, gate: definition(x, weight) * torch.sigmoid(gate),
        given,
    )


def test_an_all_zero_row_has_finite_gradients():
    """A23's kind: the gradient of a norm explodes where there is nothing to normalise."""
    x = torch.zeros(2, 5, requires_grad=True)
    rms_norm(x, torch.ones(5), 1e-5).sum().backward()
    assert x.grad.isfinite().all()
