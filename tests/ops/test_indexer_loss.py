"""The indexer's loss in blocks against autograd over the full matrices."""

import pytest
import torch
from agreement import difference

from longstrand.ops.indexer_loss import dense_indexer_loss, indexer_loss_reference, selected_indexer_loss
from longstrand.ops.indexer_loss.cases import CASES, IndexerLossCase, draw
from longstrand.ops.select import pool_scores_reference


def visible_pools(inputs):
    ids = torch.arange(len(inputs["keys"]))
    first, count = inputs["first_pool"][:, None], inputs["num_visible"][:, None]
    return (ids >= first) & (ids < first + count)


def by_autograd(inputs, visible, scale=1.0):
    """Value, and `scale` times the gradients, of the definition over the given pools."""
    leaves = {name: inputs[name].detach().clone().requires_grad_() for name in ("q", "weights", "keys")}
    loss = indexer_loss_reference(pool_scores_reference(**leaves), inputs["target"], visible).sum()
    if loss.requires_grad:
        (loss * scale).backward()
    return {"loss": loss.detach()} | {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
    }


def dense(inputs, block, scale):
    d_keys = torch.zeros_like(inputs["keys"])

    def target():
        for start in range(0, len(inputs["keys"]), block):
            pools = slice(start, min(start + block, len(inputs["keys"])))
            yield pools, inputs["target"][:, pools]

    rows = inputs["first_pool"], inputs["num_visible"]
    loss, dq, d_weights = dense_indexer_loss(
        inputs["q"], inputs["weights"], inputs["keys"], d_keys, *rows, target, scale
    )
    return {"loss": torch.tensor(loss, dtype=torch.float64), "q": dq, "weights": d_weights, "keys": d_keys}


def selected(inputs, pools):
    """The same over chosen pools [T, I], -1 unused; the mass is the target there, not renormalised."""
    mass = inputs["target"].gather(-1, pools.long().clamp(min=0)) * (pools >= 0) * 2.7
    q = inputs["q"].detach().clone().requires_grad_()
    weights = inputs["weights"].detach().clone().requires_grad_()
    d_keys = torch.zeros_like(inputs["keys"])
    scaled = q * q.shape[-1] ** -0.5
    loss = selected_indexer_loss(scaled, weights, inputs["keys"], d_keys, pools.int(), mass)
    loss.backward()
    return {"loss": loss.detach(), "q": q.grad, "weights": weights.grad, "keys": d_keys}


def chosen_pools(inputs, count, seed=0):
    """Random visible pools of each row, unused slots anywhere, and the definition's mask and target for them."""
    generator = torch.Generator().manual_seed(seed)
    visible = visible_pools(inputs)
    pools = torch.full((len(visible), count), -1)
    for t, row in enumerate(visible):
        ids = row.nonzero()[:, 0]
        ids = ids[torch.randperm(len(ids), generator=generator)][:count]
        pools[t, torch.randperm(count, generator=generator)[: len(ids)]] = ids
    mask = torch.zeros_like(visible)
    for t, row in enumerate(pools.tolist()):
        mask[t, [pool for pool in row if pool >= 0]] = True
    return pools, mask


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_dense_loss_is_the_definition_with_gradients(case, block):
    inputs = draw(case)
    truth = by_autograd(inputs, visible_pools(inputs), scale=0.3)
    ours = dense(inputs, block, scale=0.3)
    found = {name: difference(ours[name], truth[name], 1.0) for name in truth}
    assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_selected_loss_is_the_definition_over_the_selected_pools(case, count):
    inputs = draw(case)
    pools, mask = chosen_pools(inputs, count)
    target = inputs["target"] * mask
    total = target.sum(-1, keepdim=True)
    given = inputs | {"target": torch.where(total > 0, target / total, 0)}
    has_mass = mask & (total > 0)  # a row whose pools have no attention counts nothing
    truth = by_autograd(given, has_mass)
    ours = selected(inputs, pools)
    found = {name: difference(ours[name], truth[name], 1.0) for name in ("q", "weights", "keys")}
    assert max(found.values()) <= 1e-12, found
    if bool((total[mask.any(-1)] > 0).all()):
        assert float(ours["loss"]) == pytest.approx(float(truth["loss"]), abs=1e-12)


def test_gradients_are_those_of_finite_differences():
    case = IndexerLossCase("", (9, 5), heads=2, width=3)
    inputs = draw(case)
    visible, step, scale = visible_pools(inputs), 1e-6, 0.7

    def value(**changed):
        given = inputs | changed
        scores = pool_scores_reference(given["q"], given["weights"], given["keys"])
        return scale * float(indexer_loss_reference(scores, inputs["target"], visible).sum())

    ours = dense(inputs, 64, scale)
    for name in ("q", "weights", "keys"):
        flat = inputs[name].flatten()
        slopes = []
        for i in range(len(flat)):
            bump = torch.zeros_like(flat)
            bump[i] = step
            up, down = ((flat + sign * bump).view_as(inputs[name]) for sign in (1, -1))
            slopes.append((value(**{name: up}) - value(**{name: down})) / (2 * step))
        assert torch.allclose(ours[name].flatten(), torch.tensor(slopes, dtype=torch.float64), atol=1e-7)


@pytest.mark.parametrize("row", [[0, 2, -1, -1], [-1, -1, 2, 0], [3, -1, -1, -1], [-1, -1, -1, -1]], ids=str)
def test_minus_one_is_no_pool_in_the_loss_either(row):
    """A12: only the keys of the selected pools receive a gradient, and an empty row counts nothing."""
    generator = torch.Generator().manual_seed(1)
    q = torch.rand(1, 2, 5, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.rand(1, 2, generator=generator, dtype=torch.float64).requires_grad_()
    keys = torch.rand(4, 5, generator=generator, dtype=torch.float64)  # all positive: no relu is zero
    d_keys = torch.zeros_like(keys)
    pools = torch.tensor([row])
    mass = torch.tensor([[0.5, 1.0, 0.1, 2.0]], dtype=torch.float64) * (pools >= 0)
    loss = selected_indexer_loss(q, weights, keys, d_keys, pools.int(), mass)
    loss.backward()
    used = {pool for pool in row if pool >= 0}
    touched = set(d_keys.abs().sum(-1).nonzero()[:, 0].tolist())
    assert touched == (used if len(used) > 1 else set())  # one pool alone has all the mass on both sides
    assert (float(loss.detach()) > 0) == (len(used) > 1)
    assert all(grad.isfinite().all() for grad in (q.grad, weights.grad, d_keys))


def test_the_gradient_is_added_to_what_later_tiles_have_sent():
    inputs = draw(CASES[4])
    pools, _ = chosen_pools(inputs, 4)
    fresh = selected(inputs, pools)["keys"]
    before = torch.ones_like(fresh)
    mass = inputs["target"].gather(-1, pools.clamp(min=0)) * (pools >= 0)
    q = (inputs["q"] * inputs["q"].shape[-1] ** -0.5).requires_grad_()
    selected_indexer_loss(q, inputs["weights"], inputs["keys"], before, pools.int(), mass).backward()
    assert torch.allclose(before - 1, fresh, rtol=0, atol=1e-13)
