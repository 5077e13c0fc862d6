"""The short convolution against its definition and against torch's own convolution."""

import pytest
import torch
from agreement import agrees, is_as_exact_as_plain_torch

from longstrand.ops.short_conv import short_conv, short_conv_reference, short_conv_step
from longstrand.ops.short_conv.cases import CASES, ConvCase, draw


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_taps_are_the_definition(case):
    agrees(short_conv, short_conv_reference, draw(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_as_exact_as_plain_torch(case):
    is_as_exact_as_plain_torch(short_conv, short_conv_reference, draw(case))


@pytest.mark.parametrize("first", [1, 2, 3, 4])
@pytest.mark.parametrize("second", [0, 1, 2, 3, 4])
def test_pieces_shorter_than_the_window_hand_their_tail_on(first, second):
    """The joined sequence through one padded convolution, with gradients of input, weight and initial tail (A22)."""
    inputs = draw(ConvCase("", (first + second,)))
    inputs["offsets"] = torch.arange(9, 9 + first + second)

    def in_pieces(x, weight, tail, offsets):
        out, tail = short_conv(x[:, :first], weight, tail, offsets[:first])
        if second:
            rest, tail = short_conv(x[:, first:], weight, tail, offsets[first:])
            out = torch.cat([out, rest], dim=1)
        return out, tail

    def joined(x, weight, tail, offsets):
        whole = torch.cat([tail, x], dim=1)
        out = torch.nn.functional.conv1d(whole.mT, weight.unsqueeze(1), groups=len(weight)).mT
        return torch.nn.functional.silu(out), whole[:, whole.shape[1] - 3 :]

    agrees(in_pieces, joined, inputs)


def test_gradients_are_those_of_finite_differences():
    inputs = draw(ConvCase("", (3, 1, 5), before=1, channels=2))
    offsets = inputs.pop("offsets")
    leaves = tuple(value.requires_grad_() for value in inputs.values())
    assert torch.autograd.gradcheck(lambda x, w, tail: short_conv(x, w, tail, offsets), leaves)


def test_a_document_starts_from_nothing_whatever_stood_before():
    lengths = (1, 2, 3, 63, 64, 65, 5)
    inputs = draw(ConvCase("", lengths, before=0))
    packed, _ = short_conv(**inputs)
    start = 0
    for length in lengths:
        zeros = torch.zeros_like(inputs["tail"])
        document = inputs["x"][:, start : start + length]
        alone, _ = short_conv(document, inputs["weight"], zeros, torch.arange(length))
        assert torch.allclose(packed[:, start : start + length], alone, rtol=0, atol=1e-14)
        start += length


def test_the_tail_is_computed_from_what_was_given_and_inputs_stay_as_they_were():
    inputs = draw(ConvCase("", (2,)))
    kept = {name: value.clone() for name, value in inputs.items()}
    _, tail = short_conv(**inputs)
    assert torch.equal(tail, torch.cat([kept["tail"], kept["x"]], dim=1)[:, -3:])
    assert all(torch.equal(inputs[name], kept[name]) for name in inputs)


def test_a_weight_kept_in_float32_computes_bfloat16_inputs_in_float32():
    inputs = draw(ConvCase("", (9,)))
    x, tail = inputs["x"].bfloat16(), inputs["tail"].bfloat16()
    weight = inputs["weight"].float()
    narrow, _ = short_conv(x, weight, tail, inputs["offsets"])
    wide, _ = short_conv_reference(x.float(), weight, tail.float(), inputs["offsets"])
    assert narrow.dtype == torch.bfloat16
    assert torch.allclose(narrow.float(), wide, rtol=2**-8, atol=1e-6)


def test_the_tail_does_not_keep_the_tile_alive():
    """A view of the tile's inputs would hold all of them for as long as the carry lives (A28's kind)."""
    _, tail = short_conv(**draw(ConvCase("", (500,))))
    assert tail.untyped_storage().nbytes() == tail.numel() * tail.element_size()


@pytest.mark.parametrize("case", [c for c in CASES if len(c.lengths) == 1], ids=lambda case: case.name)
def test_token_after_token_in_each_row_is_the_definition(case):
    inputs = draw(case)
    expected, last = short_conv_reference(**inputs)
    tail = inputs["tail"].clone()
    rows = [short_conv_step(x, inputs["weight"], tail) for x in inputs["x"].unbind(1)]
    assert torch.allclose(torch.stack(rows, dim=1), expected, rtol=0, atol=1e-14)
    assert torch.equal(tail, last)
