"""The log-probability head against plain cross-entropy."""

import pytest
import torch
from agreement import agrees, is_as_exact_as_plain_torch

from longstrand.ops.logprob import chunked, token_logprobs, token_logprobs_reference
from longstrand.ops.logprob.cases import CASES, LogprobCase, draw


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_are_the_definition(case):
    agrees(token_logprobs, token_logprobs_reference, draw(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_as_exact_as_plain_torch(case):
    is_as_exact_as_plain_torch(token_logprobs, token_logprobs_reference, draw(case), floor=16.0)


@pytest.mark.parametrize("tokens", [1, 3, 4, 10, 64])
@pytest.mark.parametrize("words", [1, 3, 7, 64])
def test_the_size_of_a_block_changes_nothing(tokens, words, monkeypatch):
    """Four of ten labels ignored, among them the whole last block (A16)."""
    monkeypatch.setattr(chunked, "TOKEN_BLOCK", tokens)
    monkeypatch.setattr(chunked, "VOCABULARY_BLOCK", words)
    inputs = draw(LogprobCase("", ignored=(2, 7, 8, 9)))
    kept = inputs["hidden"].clone()

    def loss(op):
        return lambda hidden, weight, targets: -op(hidden, weight, targets).sum() / 6

    def cross_entropy(hidden, weight, targets):
        return torch.nn.functional.cross_entropy(hidden @ weight.T, targets, ignore_index=-1)

    agrees(loss(token_logprobs), cross_entropy, inputs)
    assert len(token_logprobs(**inputs)) == 10
    assert torch.equal(inputs["hidden"], kept)


def test_a_part_without_targets_adds_exactly_nothing():
    """A06: gradients are zeros, not None and not NaN."""
    inputs = draw(LogprobCase("", ignored=tuple(range(10))))
    hidden, weight = (inputs[name].requires_grad_() for name in ("hidden", "weight"))
    logprobs = token_logprobs(hidden, weight, inputs["targets"])
    logprobs.sum().backward()
    assert torch.equal(logprobs, torch.zeros(10, dtype=torch.float64))
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_bfloat16_weights_add_their_gradient_up_in_float32():
    """3,000 tokens in blocks: in bfloat16 the sum would stop growing at 256 equal terms."""
    hidden = torch.full((3000, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    weight.grad_dtype = torch.float32
    token_logprobs(hidden, weight, torch.zeros(3000, dtype=torch.long)).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert torch.allclose(weight.grad, torch.tensor([[1500.0], [-1500.0]]), rtol=1e-5)
