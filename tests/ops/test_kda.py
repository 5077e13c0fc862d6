"""KDA in chunks against the recurrence, token by token."""

from itertools import pairwise

import pytest
import torch
from agreement import agrees, difference, is_as_exact_as_plain_torch, run

from longstrand.ops.kda import kda, kda_reference, kda_step
from longstrand.ops.kda.cases import CASES, KdaCase, draw

ids = [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_chunks_are_the_recurrence(case):
    agrees(kda, kda_reference, draw(case), limit=1e-11)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.length in (17, 130, 67)], ids=lambda c: c.name
)
def test_float32_is_within_1e_4_of_the_float64_recurrence(case):
    inputs = {n: v.float() if v.is_floating_point() else v for n, v in draw(case).items()}
    truth, ours = run(kda_reference, inputs), run(kda, inputs, torch.float32)
    assert max(difference(ours[name], truth[name]) for name in truth) <= 1e-4


def test_bfloat16_inputs_are_computed_in_float32():
    case = KdaCase("", 33, fastest=-0.1)
    inputs = {n: v.bfloat16().float() for n, v in draw(case).items()}
    narrow = {n: v if n == "state" else v.bfloat16() for n, v in inputs.items()}
    for ours, wide in zip(kda(**narrow), kda(**inputs), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, wide)


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 40, 64])
def test_a_sequence_cut_in_two_is_one_pass(cut):
    """Widths K = 5 and V = 7 differ: a state read as [V, K] where [K, V] was written cannot pass (R14)."""
    inputs = draw(KdaCase("", 65, fastest=-1e-2))

    def in_two(state, first=None, **tokens):
        early = {name: value[:, :cut] for name, value in tokens.items()}
        late = {name: value[:, cut:] for name, value in tokens.items()}
        out, middle = kda(**early, state=state)
        rest, last = kda(**late, state=middle)
        return torch.cat([out, rest], dim=1), last

    agrees(in_two, kda, inputs, limit=1e-11)


@pytest.mark.parametrize("length", [64, 130])
@pytest.mark.parametrize("decay", ["all at the bound", "one channel at the bound"])
def test_gradients_at_the_gates_bound_are_finite_and_right_in_float32(length, decay):
    """Above the diagonal the exponents reach 5 x 63 = 315, where float32 ends at 88.7 (A05)."""
    inputs = draw(KdaCase("", length, heads=2, key=8, value=8))
    inputs["g"] = torch.full_like(inputs["g"], -5.0)
    if decay == "one channel at the bound":
        inputs["g"][..., :] = -1e-4
        inputs["g"][..., 3] = -5.0
    inputs = {name: value.float() for name, value in inputs.items()}
    truth, ours = run(kda_reference, inputs), run(kda, inputs, torch.float32)
    found = {name: difference(ours[name], truth[name]) for name in truth}
    assert max(found.values()) <= 1e-4, found


@pytest.mark.parametrize("changed", [0, 2, 5, 68, 132, 197])
def test_a_document_never_sees_another(changed):
    """Slow decay, so that a state that leaks would show (A03)."""
    lengths = (1, 2, 3, 63, 64, 65, 5)
    ends = torch.tensor(lengths).cumsum(0)
    inputs = draw(KdaCase("", sum(lengths), slowest=-0.01, fastest=-0.01, starts=tuple(ends[:-1].tolist())))
    other = {name: value.clone() for name, value in inputs.items()}
    for name in "qkv":
        other[name][:, changed] += 1
    before, after = kda(**inputs)[0], kda(**other)[0]
    document = int((ends <= changed).sum())
    own = torch.zeros(sum(lengths), dtype=torch.bool)
    own[ends[document] - lengths[document] : ends[document]] = True
    assert torch.equal(before[:, ~own], after[:, ~own])
    assert not torch.equal(before[:, own], after[:, own])


def test_documents_in_a_row_are_each_alone_with_all_gradients():
    lengths = (1, 2, 3, 63, 64, 65, 5)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    inputs = draw(KdaCase("", sum(lengths), slowest=-0.01, fastest=-0.01, starts=tuple(starts[:-1])))

    def alone(state, first, **tokens):
        outputs = []
        for start, stop in pairwise(starts):
            document = {name: value[:, start:stop] for name, value in tokens.items()}
            out, last = kda_reference(**document, state=torch.zeros_like(state))
            outputs.append(out)
        return torch.cat(outputs, dim=1), last + 0 * state

    agrees(kda, alone, inputs, limit=1e-11)


def test_the_same_call_twice_gives_the_same_and_leaves_its_inputs_alone():
    """R16: a chunk function that overwrites v."""
    inputs = draw(KdaCase("", 35, starts=(3,)))
    kept = {name: value.clone() for name, value in inputs.items()}
    first, second = run(kda, inputs), run(kda, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(inputs[name], kept[name]) for name in inputs)


@pytest.mark.parametrize("name", ["q", "v", "g", "beta", "state", "first"])
def test_wrong_shapes_are_refused(name):
    inputs = draw(KdaCase("", 20, starts=(3,)))
    inputs[name] = inputs[name][:, :-1]
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        kda(**inputs)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_float32_is_as_exact_as_the_recurrence_in_float32(case):
    """The decay's gradient has its own bound: near -5 it is the difference of large terms (1e-4, above)."""
    is_as_exact_as_plain_torch(kda, kda_reference, draw(case), floor=16.0, without="gradient of g")


@pytest.mark.parametrize("batch", [1, 3])
def test_a_token_in_each_row_is_the_definition_with_one_token(batch):
    generator = torch.Generator().manual_seed(4)
    inputs = draw(KdaCase("", 1, batch=batch), seed=4)
    inputs["state"] = torch.randn(batch, 3, 5, 7, generator=generator, dtype=torch.float64)
    expected, next_state = kda_reference(**inputs)
    state = inputs["state"].clone()
    found = kda_step(*(inputs[name][:, 0] for name in ("q", "k", "v", "g", "beta")), state)
    assert torch.allclose(found, expected[:, 0], rtol=0, atol=1e-13)
    assert torch.allclose(state, next_state, rtol=0, atol=1e-13)


def test_token_after_token_is_the_chunked_form_on_a_run_of_one_letter():
    """Repeated keys, beta near 1 and no decay: what a power of L cannot do."""
    inputs = draw(KdaCase("", 67, slowest=0.0, fastest=-1e-6))
    inputs["k"] = inputs["k"][:, :1].expand(-1, 67, -1, -1)
    inputs["beta"] = torch.full_like(inputs["beta"], 0.999)
    inputs["state"] = inputs["state"].unsqueeze(0)[:1].reshape(1, 3, 5, 7)
    expected, last = kda(**inputs)
    state = inputs["state"].clone()
    rows = [kda_step(*(inputs[n][:, t] for n in ("q", "k", "v", "g", "beta")), state) for t in range(67)]
    assert torch.allclose(torch.stack(rows, dim=1), expected, rtol=0, atol=1e-11)
    assert torch.allclose(state, last, rtol=0, atol=1e-11)
