"""Attention to selected pools against softmax over the visible tokens, listed one by one."""

import pytest
import torch
from agreement import difference

from longstrand.ops.dense_attention import dense_attention_reference
from longstrand.ops.select import select_pools
from longstrand.ops.select.cases import SelectCase
from longstrand.ops.select.cases import draw as draw_scores
from longstrand.ops.sparse_attention import gathered, sparse_attention
from longstrand.ops.sparse_attention.cases import CASES, SparseCase, draw

SCALE = 0.37


def visible_tokens(pools, slot, kpool):
    """Plain sets: the members of selected pools, and the own pool up to the query while it is incomplete."""
    tokens = {pool * kpool + inside for pool in pools if pool >= 0 for inside in range(kpool)}
    return tokens | (set(range(slot - slot % kpool, slot + 1)) if slot % kpool != kpool - 1 else set())


def definition(q, latents, pools, slots, kpool):
    """Output [T, H, L] and mass [T, I] by slot, from dense scores and a mask of Python sets."""
    hidden = torch.ones(len(q), len(latents), dtype=torch.bool)
    for t, row in enumerate(pools.tolist()):
        hidden[t, sorted(visible_tokens(row, int(slots[t]), kpool))] = False
    scores = SCALE * torch.einsum("thl,nl->thn", q, latents)
    probabilities = scores.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1)
    by_pool = probabilities.sum(1).unflatten(-1, (-1, kpool)).sum(-1)
    mass = by_pool.gather(-1, pools.long().clamp(min=0)) * (pools >= 0)
    return torch.einsum("thn,nl->thl", probabilities, latents), mass


def both(inputs, kpool, dtype=torch.float64):
    """Outputs, masses and gradients of q and latents, of ours (in `dtype`) and of the definition."""
    upstream = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ids = {"pools": inputs["pools"], "slots": inputs["slots"]}
    q, latents = (inputs[name].detach().requires_grad_() for name in ("q", "latents"))
    out, mass = definition(q, latents, **ids, kpool=kpool)
    out.backward(upstream)
    truth = results(out, mass, q.grad, latents.grad)
    q, latents = inputs["q"].detach().to(dtype).requires_grad_(), inputs["latents"].to(dtype)
    d_latents = torch.zeros_like(latents, dtype=torch.promote_types(dtype, torch.float32))
    out, mass = sparse_attention(q, latents, d_latents, **ids, kpool=kpool, scale=SCALE)
    out.backward(upstream.to(dtype))
    return results(out, mass, q.grad, d_latents), truth


def in_plain_torch(inputs, kpool, dtype):
    """The same of the definition, in `dtype`."""
    upstream = torch.randn(inputs["q"].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    q, latents = (inputs[name].detach().to(dtype).requires_grad_() for name in ("q", "latents"))
    out, mass = definition(q, latents, inputs["pools"], inputs["slots"], kpool=kpool)
    out.backward(upstream.to(dtype))
    return results(out, mass, q.grad, latents.grad)


def results(out, mass, d_q, d_latents):
    named = {"output": out, "mass": mass, "gradient of q": d_q, "gradient of latents": d_latents}
    return {name: value.detach() for name, value in named.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_softmax_over_the_visible_tokens_with_gradients(case):
    ours, truth = both(draw(case), case.kpool)
    found = {name: difference(ours[name], truth[name], 1.0) for name in truth}
    assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_exact_to_rounding(case):
    """Scores of up to 6^2 x 5 x 0.37 = 67 are rounded by 67 x 6e-8 = 4e-6, the exponent's relative error."""
    inputs = {n: v.float().double() if v.is_floating_point() else v for n, v in draw(case).items()}
    ours, truth = both(inputs, case.kpool, torch.float32)
    found = {name: difference(ours[name], truth[name], 1.0) for name in truth}
    assert max(found.values()) <= 1e-5, found


@pytest.mark.parametrize("bytes_at_once", [1, 700, 1 << 12])
def test_the_size_of_a_block_changes_nothing(bytes_at_once, monkeypatch):
    monkeypatch.setattr(gathered, "GATHER_BYTES", bytes_at_once)
    case = next(case for case in CASES if case.name == "documents")
    ours, truth = both(draw(case), case.kpool)
    assert max(difference(ours[name], truth[name], 1.0) for name in truth) <= 1e-12


@pytest.mark.parametrize("row", [[0, 2, -1, -1], [-1, -1, 2, 0], [3, -1, -1, -1], [-1, -1, -1, -1]], ids=str)
@pytest.mark.parametrize("slot", [16, 17, 18])
def test_minus_one_is_no_pool_forward_and_backward(row, slot):
    """A12: clamped to 0 and attended, or wiping a pool 0 that was selected."""
    kpool = 4
    expected = visible_tokens(row, slot, kpool)
    assert expected == {t for pool in set(row) - {-1} for t in range(4 * pool, 4 * pool + 4)} | set(
        range(16, slot + 1)
    )
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    q = torch.randn(1, 2, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = {"pools": torch.tensor([row], dtype=torch.int32), "slots": torch.tensor([slot])}
    d_latents = torch.zeros_like(latents)
    out, mass = sparse_attention(q, latents, d_latents, **ids, kpool=kpool, scale=SCALE)
    out.sum().backward()
    assert set(d_latents.abs().sum(-1).nonzero()[:, 0].tolist()) == expected
    assert [share > 0 for share in mass[0].tolist()] == [pool >= 0 for pool in row]
    for token in range(20):
        other = latents.clone()
        other[token] += 1
        changed, _ = sparse_attention(q, other, torch.zeros_like(other), **ids, kpool=kpool, scale=SCALE)
        assert torch.equal(changed, out) == (token not in expected)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 20])
@pytest.mark.parametrize("kind", ["random", "equal", "negative"])
def test_while_every_pool_fits_it_is_dense_causal_attention(length, kind):
    """A11 at index_topk = 16, kpool = 4; row t has (t + 1) // 4 pools and fits while that is at most 4."""
    kpool, num_selected = 4, 4
    scores = draw_scores(SelectCase("", (length,), kind))
    pools = select_pools(**scores, num_selected=num_selected)
    latents = torch.zeros(-(-length // kpool) * kpool, 5, dtype=torch.float64)
    latents[:length] = draw(SparseCase("", (length,)))["latents"][:length]
    q = draw(SparseCase("", (length,)))["q"].requires_grad_()
    slots = torch.arange(length)
    out, _ = sparse_attention(q, latents, torch.zeros_like(latents), pools, slots, kpool=kpool, scale=SCALE)
    dense, _ = dense_attention_reference(q, latents, slots, torch.zeros_like(slots), kpool=kpool, scale=SCALE)
    fits = (slots + 1) // kpool <= num_selected
    assert torch.allclose(out[fits], dense[fits], rtol=0, atol=1e-12)
    assert out.isfinite().all()
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_the_mass_is_the_true_attentions_restricted_to_the_pools():
    """R18 at T = 12: the teacher sums over heads and over a pool's tokens, the open pool left out."""
    inputs = draw(SparseCase("", (12,), num_selected=3))
    _, mass = sparse_attention(**inputs, d_latents=None, kpool=4, scale=SCALE)
    for t in range(12):
        tokens = sorted(visible_tokens(inputs["pools"][t].tolist(), t, 4))
        true = torch.softmax(SCALE * inputs["q"][t] @ inputs["latents"][tokens].T, dim=-1).sum(0)
        for i, pool in enumerate(inputs["pools"][t].tolist()):
            share = sum(float(p) for p, token in zip(true, tokens, strict=True) if token // 4 == pool)
            assert float(mass[t, i]) == pytest.approx(share, abs=1e-12)
        assert float(mass[t].sum()) <= 3 + 1e-12


def test_backward_adds_to_what_later_tiles_have_sent_and_leaves_other_rows_alone():
    inputs = draw(SparseCase("", (23,)))
    fresh = torch.zeros_like(inputs["latents"])
    inputs["q"].requires_grad_()
    sparse_attention(**inputs, d_latents=fresh, kpool=4, scale=SCALE)[0].sum().backward()
    before = torch.randn(fresh.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    added = before.clone()
    sparse_attention(**inputs, d_latents=added, kpool=4, scale=SCALE)[0].sum().backward()
    assert torch.allclose(added - before, fresh, rtol=0, atol=1e-13)
    unused = torch.ones(len(fresh), dtype=torch.bool)
    for t, row in enumerate(inputs["pools"].tolist()):
        unused[sorted(visible_tokens(row, int(inputs["slots"][t]), 4))] = False
    assert torch.equal(added[unused], before[unused])


def test_fresh_memory_is_written_before_it_is_read(fresh_memory_is_nan):
    for case in CASES:
        ours, truth = both(draw(case), case.kpool)
        assert max(difference(ours[name], truth[name], 1.0) for name in truth) <= 1e-12
