"""Routed experts against a plain loop, and the clamped activation on all three paths."""

import pytest
import torch
from agreement import agrees, is_as_exact_as_plain_torch, run

from longstrand.model.ffn import Dense
from longstrand.ops.experts import experts, experts_reference
from longstrand.ops.experts.cases import CASES, ExpertsCase, draw
from longstrand.ops.swiglu import swiglu


def with_limit(op, limit):
    return lambda **inputs: op(**inputs, limit=limit)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_grouped_experts_are_the_loop_over_tokens(case):
    agrees(with_limit(experts, case.limit), with_limit(experts_reference, case.limit), draw(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_as_exact_as_plain_torch(case):
    is_as_exact_as_plain_torch(
        with_limit(experts, case.limit), with_limit(experts_reference, case.limit), draw(case), floor=16.0
    )


@pytest.mark.parametrize("name", ["all tokens to one expert", "one token", "two of many experts"])
def test_an_expert_without_tokens_has_a_gradient_of_exactly_zero_twice_in_a_row(name, fresh_memory_is_nan):
    """A29: rows that nobody wrote look fine at the first step and are NaN at the second."""
    case = next(case for case in CASES if case.name == name)
    inputs = draw(case)
    unused = sorted(set(range(case.num_experts)) - set(inputs["ids"].flatten().tolist()))
    assert unused
    for _ in range(2):
        found = run(with_limit(experts, case.limit), inputs)
        assert all(value.isfinite().all() for value in found.values())
        for weight in ("gate_up", "down"):
            assert torch.equal(
                found[f"gradient of {weight}"][unused], torch.zeros_like(inputs[weight][unused])
            )


@pytest.mark.parametrize("gate", [-30.0, -10.0, 0.3, 10.0, 30.0])
@pytest.mark.parametrize("up", [-30.0, 0.3, 30.0])
def test_the_gate_is_clamped_above_only_and_up_on_both_sides(gate, up):
    """R13, on each path that has a SwiGLU: the op, a dense or shared part, the routed experts."""
    limit = 10.0
    wanted = torch.nn.functional.silu(torch.tensor(min(gate, limit))) * max(-limit, min(up, limit))
    one = torch.ones(1, 1)
    assert torch.allclose(swiglu(torch.tensor([[gate, up]]), limit), wanted)
    dense = Dense(1, 1, limit)
    for name, value in (("gate_proj", gate), ("up_proj", up), ("down_proj", 1.0)):
        getattr(dense, name).weight.data.fill_(value)
    assert torch.allclose(dense(one), wanted)
    gate_up = torch.tensor([[[gate], [up]]])
    routed = experts(one, torch.zeros(1, 1, dtype=torch.long), one, gate_up, torch.ones(1, 1, 1), limit)
    assert torch.allclose(routed, wanted)


def test_the_clamps_gradients_are_those_of_clamp_in_plain_torch():
    gate = torch.tensor([-30.0, -10.0, -0.3, 9.9, 10.0, 30.0], dtype=torch.float64)
    inputs = {"gate": gate.repeat(6, 1), "up": gate.repeat(6, 1).T.contiguous()}

    def plain(gate, up):
        return torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)

    agrees(lambda gate, up: swiglu(torch.cat([gate, up], -1), 10.0), plain, inputs)


def test_the_order_of_the_chosen_experts_does_not_matter():
    inputs = draw(ExpertsCase("", active=3))
    turned = inputs | {"ids": inputs["ids"].flip(-1), "weights": inputs["weights"].flip(-1)}
    assert torch.allclose(experts(**inputs, limit=10.0), experts(**turned, limit=10.0), rtol=0, atol=1e-12)
