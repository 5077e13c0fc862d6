"""The ops as the figure measures them: ours and transformers' compute the definition, both ways."""

from dataclasses import replace

import pytest
import torch

from longstrand.bench._op_cases import OPS
from longstrand.bench._small_models import architecture
from longstrand.bench.ops import _as_list, both_ways, cast, errors, table, times

SHAPE = architecture("KD", vocab_size=19)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_both_sides_compute_the_definition(op):
    found = errors(replace(op, short=64), SHAPE)  # more pools than are selected
    assert max(found.values()) <= 1e-5, found
    assert ("transformers" in found) == (op.name != "select")


@pytest.mark.parametrize(
    "op", [op for op in OPS if op.theirs and op.name != "sparse_attention"], ids=lambda op: op.name
)
def test_both_sides_have_the_same_gradients_in_what_is_timed(op):
    """In float32 and to its rounding; the state's gradient of KDA and all others that both sides have."""
    grads = []
    for call in (op.ours, op.theirs):
        inputs = {
            name: x.requires_grad_() if x.is_floating_point() else x
            for name, x in cast(op.draw(SHAPE, 40), torch.float32).items()
        }
        outputs = _as_list(call(SHAPE, **inputs))
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(out.shape, generator=generator) for out in outputs]
        torch.autograd.backward(outputs, upstream)
        grads.append(
            {name: x.grad for name, x in inputs.items() if x.is_floating_point() and x.grad is not None}
        )
    for name in grads[0].keys() & grads[1].keys():
        error = (grads[0][name] - grads[1][name]).norm() / grads[1][name].norm().clamp(min=1e-3)
        assert error < 1e-3, (name, float(error))


def test_a_timed_call_leaves_no_gradient_behind():
    op = OPS[0]
    inputs = cast(op.draw(SHAPE, 8), torch.float32)
    both_ways(op.ours, SHAPE, inputs)()
    assert all(x.grad is None for x in inputs.values())


def test_a_row_has_a_time_for_each_side_and_way():
    op = next(op for op in OPS if op.name == "norm")
    detail = {"op": op.name, "config": "toy", "errors": errors(op, SHAPE), "us": times(op, SHAPE, 8)}
    (row,) = table([{"detail": detail}])["rows"]
    assert len(row) == len(table([])["columns"]) and all(row)
