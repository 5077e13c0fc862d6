"""Selection of pools against plain Python sorting: causal, complete, ties to the lowest id."""

import math

import pytest
import torch

from longstrand.ops import native
from longstrand.ops.select import (
    blockwise,
    own,
    pool_scores,
    pool_scores_reference,
    select_own_pools,
    select_pools,
    select_pools_reference,
)
from longstrand.ops.select.cases import CASES, SelectCase, draw


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_selection_is_that_of_plain_sorting(case):
    inputs = draw(case)
    chosen = select_pools(**inputs, num_selected=case.num_selected)
    assert torch.equal(chosen, select_pools_reference(**inputs, num_selected=case.num_selected))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_future_pool_no_duplicate_and_the_expected_number(case):
    """A11: missing slots must not be filled with hidden pools."""
    inputs = draw(case)
    first, visible = inputs["first_pool"].tolist(), inputs["num_visible"].tolist()
    for t, row in enumerate(select_pools(**inputs, num_selected=case.num_selected).tolist()):
        used = [pool for pool in row if pool != -1]
        assert row[len(used) :] == [-1] * (case.num_selected - len(used))
        assert len(set(used)) == len(used) == min(visible[t], case.num_selected)
        assert all(first[t] <= pool < first[t] + visible[t] for pool in used)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("pools", [1, 3, 5, 64])
@pytest.mark.parametrize("name", ["documents", "tied documents", "equal scores", "falling scores"])
def test_the_size_of_a_block_changes_nothing_not_even_among_ties(name, rows, pools, monkeypatch):
    case = next(case for case in CASES if case.name == name)
    inputs = draw(case)
    monkeypatch.setattr(blockwise, "ROW_BLOCK", rows)
    monkeypatch.setattr(blockwise, "POOL_BLOCK", pools)
    chosen = select_pools(**inputs, num_selected=case.num_selected)
    assert torch.equal(chosen, select_pools_reference(**inputs, num_selected=case.num_selected))


@pytest.mark.parametrize("length", [7, 67, 300])
def test_rows_given_in_pieces_select_what_they_select_together(length):
    """A wrong row offset shows where scoring is cut."""
    case = SelectCase("", (length, 41))
    inputs = draw(case)
    together = select_pools(**inputs, num_selected=case.num_selected)
    for cut in (1, 5, length - 1):
        for rows in (slice(0, cut), slice(cut, None)):
            piece = {name: value if name == "keys" else value[rows] for name, value in inputs.items()}
            assert torch.equal(select_pools(**piece, num_selected=case.num_selected), together[rows])


def test_unused_slots_are_minus_one_in_memory_that_was_never_written(fresh_memory_is_nan):
    """R17: fresh buffers come filled with the largest id."""
    for case in CASES:
        inputs = draw(case)
        chosen = select_pools(**inputs, num_selected=case.num_selected)
        assert torch.equal(chosen, select_pools_reference(**inputs, num_selected=case.num_selected))


NOT_FINITE = {
    "minus infinity": [-1.0, -torch.inf, -5.0, -torch.inf, -torch.inf, -torch.inf, -torch.inf],
    "all minus infinity": [-torch.inf] * 9,
    "enough beside minus infinity": [-torch.inf, -3.0, -4.0, -torch.inf, -5.0, -2.0, -9.0],
    "NaN": [torch.nan, 3.0, torch.nan, torch.nan, 1.0, torch.nan],
    "NaN and minus infinity": [-torch.inf, torch.nan, -7.0, torch.nan, -torch.inf, -1.0, -torch.inf],
    "all NaN": [torch.nan] * 11,
    "infinity": [1.0, torch.inf, 2.0, torch.inf, 5.0, torch.nan, 0.5],
    "as low as can be": [-3.4028234663852886e38, -torch.inf, torch.nan, -1.0, -3.0, -3.4028234663852886e38],
}


@pytest.mark.parametrize("form", ["portable", "kernel", "own"])
@pytest.mark.parametrize("scores", NOT_FINITE.values(), ids=NOT_FINITE)
def test_a_visible_pool_is_chosen_before_a_hidden_one_whatever_its_score(scores, form):
    """Hidden is not the same as low; NaN counts as minus infinity, and ties go to the lowest id."""
    count = 4
    if form == "kernel" and not native.use_native("auto").used:
        pytest.skip("no compiler")
    low = [-torch.inf if math.isnan(score) else score for score in scores]
    best = sorted(sorted(range(len(scores)), key=lambda pool: (-low[pool], pool))[:count])
    sign = -1.0 if any(score < 0 for score in scores) else 1.0
    keys = torch.tensor(scores)[:, None] * sign  # the score is sign x relu(1 x key)
    hidden = torch.full((2, 1), 1e-9 if sign < 0 else 9.0)  # would score better than most
    one, weight, visible = torch.ones(1, 1, 1), torch.full((1, 1), sign), torch.tensor([len(scores)])
    if form == "own":
        chosen = select_own_pools(one, weight, torch.cat([keys, hidden])[None], visible, count)
    else:
        keys = torch.cat([hidden, keys, hidden])
        chosen = select_pools(one, weight, keys, torch.tensor([2]), visible, count) - 2
        assert torch.equal(
            select_pools_reference(one, weight, keys, torch.tensor([2]), visible, count) - 2, chosen
        )
    assert chosen.tolist() == [best]


@pytest.mark.parametrize("form", ["portable", "kernel", "own"])
def test_queries_that_are_nan_choose_the_lowest_visible_pools(form):
    if form == "kernel" and not native.use_native("auto").used:
        pytest.skip("no compiler")
    inputs = {n: v.float() if v.is_floating_point() else v for n, v in draw(SelectCase("", (40,))).items()}
    assert int(inputs["num_visible"].max()) > 4  # scored
    inputs["q"] = inputs["q"] * torch.nan
    if form == "own":
        rows = slice(39, 40)
        keys = inputs["keys"].unsqueeze(0)
        chosen = select_own_pools(inputs["q"][rows], inputs["weights"][rows], keys, torch.tensor([10]), 4)
        assert chosen.tolist() == [[0, 1, 2, 3]]
        return
    for seen, row in zip(
        inputs["num_visible"].tolist(), select_pools(**inputs, num_selected=4).tolist(), strict=True
    ):
        assert row == [*range(min(seen, 4)), *[-1] * (4 - min(seen, 4))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scores_are_the_definition(case):
    inputs = draw(case)
    inputs = {name: inputs[name] for name in ("q", "weights", "keys")}
    assert torch.allclose(pool_scores(**inputs), pool_scores_reference(**inputs), rtol=1e-13, atol=1e-13)


def test_a_long_row_of_ties_takes_the_lowest_ids():
    num_pools, num_selected = 9000, 512  # more than two blocks
    keys = torch.zeros(num_pools, 2)
    keys[::3, 0] = 1.0
    q = torch.tensor([[[1.0, 0.0]]])
    chosen = select_pools(
        q, torch.ones(1, 1), keys, torch.tensor([5]), torch.tensor([num_pools - 10]), num_selected
    )
    assert torch.equal(chosen[0], torch.arange(6, 6 + 3 * num_selected, 3, dtype=torch.int32))


@pytest.mark.parametrize("block", [1, 5, 8192])
@pytest.mark.parametrize("name", ["documents", "tied documents", "equal scores", "rising scores", "one slot"])
def test_rows_with_keys_of_their_own_select_as_documents_of_a_pack_do(name, block, monkeypatch):
    """The last token of each document, its keys laid beside those of the others; what lies behind them is hidden."""
    monkeypatch.setattr(own, "OWN_BLOCK", block)
    case = next(case for case in CASES if case.name == name)
    inputs = draw(case)
    expected = select_pools_reference(**inputs, num_selected=case.num_selected)
    last = torch.tensor(case.lengths).cumsum(0) - 1
    first, visible = inputs["first_pool"][last], inputs["num_visible"][last]
    keys = torch.full((len(last), int(visible.max()) + 2, case.width), 9.0, dtype=torch.float64)
    for row in range(len(last)):
        keys[row, : visible[row]] = inputs["keys"][first[row] : first[row] + visible[row]]
    found = select_own_pools(inputs["q"][last], inputs["weights"][last], keys, visible, case.num_selected)
    assert torch.equal(torch.where(found < 0, found, found + first[:, None]), expected[last].long())


def test_a_row_that_is_not_finite_harms_no_other():
    inputs = draw(SelectCase("", (40, 40)))
    q, weights = inputs["q"][[39, 79]], inputs["weights"][[39, 79]]
    keys, visible = inputs["keys"].view(2, 10, -1), torch.tensor([10, 10])
    expected = select_own_pools(q, weights, keys, visible, 4)
    q[0] = torch.nan
    assert torch.equal(select_own_pools(q, weights, keys, visible, 4)[1], expected[1])
