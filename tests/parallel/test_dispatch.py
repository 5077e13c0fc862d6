"""Experts spread over ranks against the definition, and against one process, whatever the choice and the bound."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstrand.errors import UserError
from longstrand.ops.experts import experts, experts_reference
from longstrand.parallel import Axis, Spread, experts_over, make_mesh, run_ranks
from longstrand.parallel.dispatch import plan_rounds

NUM_EXPERTS, WIDTH, INNER, LIMIT = 4, 5, 7, 1.0
BOUNDS = (4, 7, 10_000)
CASES = {  # tokens of each rank; active experts; those that may be chosen
    "random": ((7, 5, 11, 3), 2, (0, 1, 2, 3)),
    "all tokens to one expert": ((9, 4, 6, 13), 1, (2,)),
    "all tokens to one expert of the first rank": ((3, 8, 1, 2), 1, (0,)),
    "one token in all": ((0, 1, 0, 0), 2, (0, 1, 2, 3)),
    "a rank without tokens, and one expert without": ((0, 6, 17, 5), 2, (0, 1, 3)),
    "every expert active": ((5, 2, 0, 3), 4, (0, 1, 2, 3)),
    "no token at all": ((0, 0, 0, 0), 2, (0, 1, 2, 3)),
}


@pytest.fixture
def fresh_memory_is_nan():
    """`torch.empty` and its kin come filled with NaN, or with the largest integer."""
    was = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = was[0]
    torch.use_deterministic_algorithms(was[1])


def _draw(name, num_ranks, dtype=torch.float64):
    """Weights, and each rank's x, ids, weights and gradient of the output."""
    tokens, active, allowed = CASES[name]
    generator = torch.Generator().manual_seed(len(name))

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    params = noise(NUM_EXPERTS, 2 * INNER, WIDTH), noise(NUM_EXPERTS, WIDTH, INNER)
    parts = []
    for num in tokens[:num_ranks]:
        order = torch.rand(num, len(allowed), generator=generator).argsort(-1)[:, :active]
        weights = noise(num, active).to(torch.float32 if dtype == torch.bfloat16 else dtype)
        parts.append((noise(num, WIDTH), torch.tensor(allowed)[order], weights, noise(num, WIDTH)))
    return params, parts


def _compute(rows, ids, gate_up, down):
    assert len(rows), "an empty round is not computed"
    one = torch.ones(len(rows), 1, dtype=torch.promote_types(rows.dtype, torch.float32))
    return experts(rows, ids[:, None], one, gate_up, down, LIMIT)


def _apply(spread, params, part):
    """Output and gradients of one rank."""
    own = slice(spread.first, spread.first + spread.per_rank)
    leaves = [each[own].clone().requires_grad_() for each in params]
    for leaf in leaves:
        leaf.grad_dtype = torch.promote_types(leaf.dtype, torch.float32)
    x, weights = (part[i].clone().requires_grad_() for i in (0, 2))
    out = experts_over(spread, x, part[1], weights, _compute, leaves)
    out.backward(part[3])
    return out.detach(), x.grad, weights.grad, *(leaf.grad for leaf in leaves)


def _all_cases(num_ranks):
    axis = make_mesh(data=num_ranks, context=1, expert=num_ranks).expert
    found = {}
    for name in CASES:
        for bound in BOUNDS:
            params, parts = _draw(name, num_ranks)
            for step in range(2):
                spread = Spread(axis, NUM_EXPERTS, bound)
                results = _apply(spread, params, parts[axis.rank])
                found[name, bound, step] = (results, spread.largest_received, spread.num_rounds)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_spread_experts_are_the_definition_on_all_tokens(num_ranks, fresh_memory_is_nan):
    """A29: twice in a row, and no memory is read that nobody wrote."""
    ranks = run_ranks(num_ranks, _all_cases, num_ranks, start="fork", timeout=200)
    for (name, bound, step), _ in ranks[0].items():
        params, parts = _draw(name, num_ranks)
        leaves = [each.clone().requires_grad_() for each in params]
        joined = [torch.cat([part[i] for part in parts]) for i in range(4)]
        x, weights = joined[0].requires_grad_(), joined[2].requires_grad_()
        if len(x):
            out = experts_reference(x, joined[1], weights, *leaves, LIMIT)
            out.backward(joined[3])
        else:
            out = x
            for each in (x, weights, *leaves):
                each.grad = torch.zeros_like(each)
        found = [rank[name, bound, step] for rank in ranks]
        for i, truth in enumerate((out, x.grad, weights.grad, leaves[0].grad, leaves[1].grad)):
            ours = torch.cat([results[i] for results, _, _ in found])
            torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12, msg=f"{name}, {bound}: {i}")
        unused = sorted(set(range(NUM_EXPERTS)) - set(joined[1].flatten().tolist()))
        gathered = torch.cat([results[3] for results, _, _ in found])
        assert torch.equal(gathered[unused], torch.zeros_like(gathered[unused]))
        assert max(largest for _, largest, _ in found) <= bound
        assert len({rounds for _, _, rounds in found}) == 1
        pairs = joined[1].numel()
        assert found[0][2] >= 2 * -(-pairs // (num_ranks * bound))


def _dtypes_moved():
    axis = make_mesh(data=2, context=1, expert=2).expert
    params, parts = _draw("random", 2, torch.bfloat16)
    moved, own = [], axis.exchange
    axis.exchange = lambda x, send, receive, what: (
        moved.append((what, x.dtype)) or own(x, send, receive, what)
    )
    results = _apply(Spread(axis, NUM_EXPERTS, 7), params, parts[axis.rank])
    return results, set(moved), dict(axis.received)


def test_rows_of_bfloat16_move_as_such_and_gradients_of_experts_are_float32():
    ranks = run_ranks(2, _dtypes_moved, start="fork", timeout=100)
    wide, parts = _draw("random", 2, torch.bfloat16)
    wide, parts = [each.double() for each in wide], [[each.double() for each in part] for part in parts]
    for rank, (results, moved, received) in enumerate(ranks):
        assert moved == {
            (what, torch.bfloat16) for what in ("expert tokens", "expert outputs", "expert gradients")
        }
        x, ids, weights, _ = parts[rank]
        truth = experts_reference(x, ids.long(), weights, *wide, LIMIT)
        assert (results[0].double() - truth).norm() < 0.01 * truth.norm()
        assert [each.dtype for each in results] == [torch.bfloat16] * 2 + [torch.float32] * 3
        first = torch.tensor([0, 1]) if rank == 0 else torch.tensor([2, 3])
        others = torch.isin(
            parts[1 - rank][1], first
        ).sum()  # pairs of the other rank that have their expert here
        away = (~torch.isin(ids, first)).sum()
        assert received["expert tokens"] == others * WIDTH * 2
        assert received["expert outputs"] == away * WIDTH * 2
        # There: x, d_out and a float32; back: d_x and a float32.
        assert received["expert gradients"] == others * (2 * WIDTH + 2) * 2 + away * (WIDTH + 2) * 2


def test_what_is_kept_for_backward_does_not_depend_on_the_number_of_rounds():
    params, parts = _draw("random", 4)
    part = [torch.cat([part[i] for part in parts]) for i in range(4)]
    kept, rounds, largest = [], [], []
    for receive in (1, 4, 10_000):
        sizes, calls = [], []

        def compute(rows, *more, calls=calls):
            calls.append(len(rows))
            return _compute(rows, *more)

        spread = Spread(Axis("expert"), NUM_EXPERTS, receive)
        leaves = [each.clone().requires_grad_() for each in params]
        x, weights = (part[i].clone().requires_grad_() for i in (0, 2))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.nbytes) or x, lambda x: x
        ):
            out = experts_over(spread, x, part[1], weights, compute, leaves)
        own = [x, part[1], weights, *leaves]
        assert sorted(sizes) == sorted(each.nbytes for each in own)
        out.backward(part[3])
        kept.append(sum(sizes))
        rounds.append(len(calls) // 2)
        largest.append(max(calls))
    assert kept[0] == kept[1] == kept[2]
    assert rounds == [52, 13, 1]
    assert largest == [1, 4, 52]


def test_gradients_of_experts_add_up_over_rounds_in_float32():
    """600 equal rows, each in a round of its own: a sum in bfloat16 would stay behind from the 256th on."""
    params = _draw("random", 1, torch.bfloat16)[0]
    x = torch.ones(600, WIDTH, dtype=torch.bfloat16)
    ids, weights = torch.zeros(600, 1, dtype=torch.long), torch.ones(600, 1)
    spread = Spread(Axis("expert"), NUM_EXPERTS, 1)
    one, all_rows = (_apply(spread, params, (x[:n], ids[:n], weights[:n], x[:n])) for n in (1, 600))
    for ours, row in zip(all_rows[3:], one[3:], strict=True):
        torch.testing.assert_close(ours, 600 * row, rtol=1e-4, atol=0)


def test_without_a_graph_nothing_is_kept():
    params, parts = _draw("random", 1)
    x, ids, weights, _ = parts[0]
    with torch.no_grad():
        out = experts_over(Spread(Axis("expert"), NUM_EXPERTS, 3), x, ids, weights, _compute, params)
    assert not out.requires_grad
    torch.testing.assert_close(
        out, experts_reference(x, ids, weights, *params, LIMIT), rtol=1e-12, atol=1e-12
    )


def test_a_frozen_expert_receives_no_gradient_and_its_tokens_do():
    params, parts = _draw("random", 1)
    x, ids, weights, d_out = parts[0]
    x.requires_grad_()
    experts_over(Spread(Axis("expert"), NUM_EXPERTS, 3), x, ids, weights, _compute, params).backward(d_out)
    found = x.grad.clone()
    x.grad = None
    experts_reference(x, ids, weights, *params, LIMIT).backward(d_out)
    assert all(each.grad is None for each in params)
    torch.testing.assert_close(found, x.grad, rtol=1e-12, atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rounds_take_every_pair_once_and_no_rank_receives_more_than_the_bound(data):
    num_ranks = data.draw(st.integers(1, 5))
    counts = st.one_of(st.just(0), st.integers(0, 30), st.integers(0, 2000))
    cells = torch.tensor(
        data.draw(st.lists(counts, min_size=num_ranks**2, max_size=num_ranks**2)), dtype=torch.int64
    ).view(num_ranks, num_ranks)
    receive = data.draw(st.integers(num_ranks, 300))
    cuts = torch.from_numpy(plan_rounds(cells.numpy(), receive))
    assert torch.equal(cuts[0], torch.zeros_like(cells)) and torch.equal(cuts[-1], cells)
    sizes = cuts.diff(dim=0)
    assert (sizes >= 0).all()
    if len(sizes):
        assert sizes.sum(1).max() <= receive and sizes.sum(2).max() <= receive
    most = max(cells.sum(0).max(), cells.sum(1).max())
    if most <= receive:
        assert len(sizes) == (most > 0)


@pytest.mark.parametrize(
    ("size", "receive", "words"),
    [
        (4, 3, "parallel.receive = 3: must be at least parallel.expert = 4"),
        (3, 100, "parallel.expert = 3: must divide the model's 4 routed experts; choose a divisor"),
    ],
)
def test_sizes_that_cannot_be_are_refused(size, receive, words):
    axis = Axis("expert")
    axis.size = size
    with pytest.raises(UserError, match=words):
        Spread(axis, NUM_EXPERTS, receive)
