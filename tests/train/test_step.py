"""One step: a token counts the same wherever it stands, and what is not finite moves nothing."""

import math

import pytest
import torch
from tiny_training import documents, optimizer_of, packs, settings, tiny_model, weights
from torch import nn

from longstrand.data import Pack
from longstrand.errors import CheckFailed
from longstrand.memory import Levers
from longstrand.model import Model
from longstrand.parallel import one_process
from longstrand.train.step import move_router_bias, take_step


class Table(Model):
    """Each token has a loss of its own: -logprob = cost[target] ** power, whatever stands before it."""

    def __init__(self, costs, power=1.0):
        nn.Module.__init__(self)
        self.architecture, self.mesh = tiny_model().architecture, one_process()
        self.cost = nn.Parameter(torch.tensor(costs))
        self.power = power

    def token_logprobs(self, pack, levers=None, side=None):
        return torch.where(pack.targets >= 0, -(self.cost[pack.targets.clamp(min=0)] ** self.power), 0.0)

    def groups(self):
        return {"head": ["cost"]}


class Gradient(Table):
    """Has the given gradient, whatever the pack."""

    def __init__(self, gradient):
        super().__init__([0.0] * len(gradient))
        self.gradient = gradient

    def token_logprobs(self, pack, levers=None, side=None):
        return -(self.cost @ self.gradient).expand(len(pack))


FIVE_CHEAP = torch.tensor([0, 1, 1, 1, 1, 1])  # 5 targets, loss 1 each
ONE_DEAR = torch.tensor([0, 2])  # 1 target, loss 7
MASKED = torch.tensor([0, 3, 3])


def _masked():
    return Pack.from_documents([MASKED], [torch.zeros(3)])


def _step(model, some_packs, train=None, step=1):
    train = train or settings()
    optimizer = optimizer_of(model, train)
    return take_step(model, some_packs, optimizer, train, step=step, levers=Levers(tile=16)), optimizer


@pytest.mark.parametrize("split", ["one pack", "two packs", "with a part without targets"])
def test_every_token_counts_the_same_however_a_step_is_split(split):
    parts = {
        "one pack": [Pack.from_documents([FIVE_CHEAP, ONE_DEAR])],
        "two packs": [Pack.from_documents([FIVE_CHEAP]), Pack.from_documents([ONE_DEAR])],
        "with a part without targets": [
            Pack.from_documents([FIVE_CHEAP]), _masked(), Pack.from_documents([ONE_DEAR]),
        ],
    }[split]  # fmt: skip
    result, optimizer = _step(Table([0.0, 1.0, 7.0, 5.0]), parts)
    assert result.loss == pytest.approx(2.0, rel=1e-7)
    assert result.targets == 6
    assert result.tokens == sum(len(part) for part in parts)
    expected = torch.tensor([0.0, 5 / 6, 1 / 6, 0.0])
    torch.testing.assert_close(optimizer.seen[0]["cost"], expected, rtol=1e-6, atol=0)
    assert result.grad_norm == pytest.approx(math.sqrt(26) / 6, rel=1e-6)


def test_weights_of_targets_weigh_the_mean():
    weighted = Pack.from_documents([FIVE_CHEAP, ONE_DEAR], [torch.full((6,), 0.5), torch.full((2,), 2.0)])
    result, _ = _step(Table([0.0, 1.0, 7.0, 5.0]), [weighted])
    assert result.loss == pytest.approx((2.5 * 1 + 2 * 7) / 4.5, rel=1e-7)


def test_a_step_without_targets_is_reported_and_moves_nothing():
    model = tiny_model()
    before = weights(model)
    result, optimizer = _step(model, [_masked(), _masked()], settings(balance="bias", weight_decay=0.1))
    assert (result.loss, result.grad_norm, result.targets, result.tokens) == (None, None, 0, 6)
    assert optimizer.updates == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def _assert_same_gradients(found, expected, bound):
    assert found.keys() == expected.keys()
    floor = 1e-6 * max(float(gradient.norm()) for gradient in expected.values())
    for name, gradient in expected.items():
        error = float((found[name] - gradient).norm())
        assert error <= bound * max(float(gradient.norm()), floor), name


@pytest.mark.parametrize(
    "train",
    [
        settings(),
        settings(balance="aux", balance_rate=0.5),
        settings(indexer="sparse"),
        settings(indexer="warmup"),
    ],
    ids=["plain", "aux", "sparse", "warmup"],
)
def test_packs_one_by_one_give_the_gradients_of_one_pack_with_all_documents(train):
    lengths = (33, 5, 18)
    apart, one = _step(tiny_model(), packs(*lengths), train)
    joined, other = _step(tiny_model(), [Pack.from_documents(documents(*lengths))], train)
    _assert_same_gradients(one.seen[0], other.seen[0], 1e-10)
    assert apart.loss == pytest.approx(joined.loss, rel=1e-12)
    assert apart.expert_load_max_over_mean == joined.expert_load_max_over_mean
    assert apart.indexer_kl == (joined.indexer_kl and pytest.approx(joined.indexer_kl, rel=1e-10))


def test_a_fully_masked_pack_beside_a_normal_one_adds_exactly_nothing():
    _, alone = _step(tiny_model(), packs(21))
    _, beside = _step(tiny_model(), [_masked(), *packs(21)])
    for name, gradient in alone.seen[0].items():
        assert torch.equal(gradient, beside.seen[0][name]), name


def test_a_frozen_indexer_is_bit_equal_after_two_steps_with_weight_decay():
    model, train = tiny_model(), settings(weight_decay=0.5)
    before = weights(model)
    optimizer = optimizer_of(model, train)
    for step in (1, 2):
        take_step(model, packs(40, seed=step), optimizer, train, step=step, levers=Levers(tile=16))
    for name, tensor in model.state_dict().items():
        still = ".indexer." in name or name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, before[name]) == still, name


def test_the_indexers_loss_moves_the_indexer_and_leaves_all_other_gradients():
    plain, without = _step(tiny_model(), packs(40))
    learning, with_loss = _step(tiny_model(), packs(40), settings(indexer="sparse"))
    for name, gradient in with_loss.seen[0].items():
        if ".indexer." in name:
            assert torch.isfinite(gradient).all() and float(gradient.norm()) > 0, name
        else:
            assert torch.equal(gradient, without.seen[0][name]), name
    assert plain.indexer_kl is None
    assert learning.indexer_kl > 0


def test_an_indexer_loss_of_weight_zero_runs_through():
    train = settings(indexer="sparse").model_copy(update={"indexer_weight": 0.0})
    _, optimizer = _step(tiny_model(), packs(40), train)
    for name, gradient in optimizer.seen[0].items():
        assert torch.isfinite(gradient).all(), name
        assert ".indexer." not in name or not gradient.any(), name


def test_the_indexers_loss_scales_with_its_weight_only():
    _, one = _step(tiny_model(), packs(40), settings(indexer="warmup"))
    _, three = _step(tiny_model(), packs(40), settings(indexer="warmup", indexer_weight=3.0))
    _assert_same_gradients(three.seen[0], {name: 3 * g for name, g in one.seen[0].items()}, 1e-12)


def test_the_routers_bias_rises_below_the_mean_load_and_falls_above_it():
    model = tiny_model()
    counts = {1: torch.tensor([4, 0, 2, 2, 3, 1, 2, 2]), 3: torch.tensor([0, 0, 0, 16, 0, 0, 0, 0])}
    before = weights(model)
    move_router_bias(model, counts, 0.25)
    name = "layers.{}.mlp.gate.e_score_correction_bias"
    moved = {
        layer: model.state_dict()[name.format(layer)] - before[name.format(layer)] for layer in (1, 2, 3)
    }
    assert moved[1].tolist() == [-0.25, 0.25, 0, 0, -0.25, 0.25, 0, 0]
    assert moved[2].tolist() == [0] * 8
    assert moved[3].tolist() == [0.25] * 3 + [-0.25] + [0.25] * 4


def test_bias_balance_follows_the_counts_of_the_whole_step_in_every_layer():
    model, train = tiny_model(), settings(balance="bias", balance_rate=0.125)
    counted = []
    plain = Model.token_logprobs

    def counting(self, pack, levers=None, side=None):
        out = plain(self, pack, levers, side)
        counted.append({layer: count.clone() for layer, count in side.expert_counts.items()})
        return out

    model.token_logprobs = counting.__get__(model)
    _step(model, packs(40, 23), train)
    assert [sorted(counts) for counts in counted] == [[1, 2, 3], [1, 2, 3]]
    for layer in (1, 2, 3):
        count = counted[0][layer] + counted[1][layer]
        assert int(count.sum()) == (40 + 23) * 2
        bias = model.get_buffer(f"layers.{layer}.mlp.gate.e_score_correction_bias")
        expected = [0.125 * ((c < count.sum() / 8).item() - (c > count.sum() / 8).item()) for c in count]
        assert bias.tolist() == expected


def test_clipping_scales_all_gradients_by_their_common_norm():
    free, unclipped = _step(tiny_model(), packs(40))
    limit = free.grad_norm / 4
    clipped, optimizer = _step(tiny_model(), packs(40), settings(clip=limit))
    assert clipped.grad_norm == free.grad_norm
    true = math.sqrt(sum(float((g.double() ** 2).sum()) for g in unclipped.seen[0].values()))
    assert free.grad_norm == pytest.approx(true, rel=1e-6)
    _assert_same_gradients(optimizer.seen[0], {n: g / 4 for n, g in unclipped.seen[0].items()}, 1e-12)


def test_gradients_below_the_limit_are_not_scaled():
    free, unclipped = _step(tiny_model(), packs(40))
    _, optimizer = _step(tiny_model(), packs(40), settings(clip=free.grad_norm * 1.001))
    assert all(torch.equal(g, unclipped.seen[0][name]) for name, g in optimizer.seen[0].items())


def test_the_norm_of_a_large_gradient_is_exact():
    many = torch.full((3_000_001,), 0.1)
    result, _ = _step(Gradient(many), [Pack.from_documents([FIVE_CHEAP])])
    assert result.grad_norm == pytest.approx(0.1 * math.sqrt(3_000_001), rel=1e-6)


def test_a_loss_that_is_not_finite_stops_before_anything_moves():
    model = Table([0.0, 1.0, float("inf"), 5.0])
    before = weights(model)
    good_then_bad = [Pack.from_documents([FIVE_CHEAP]), Pack.from_documents([ONE_DEAR])]
    with pytest.raises(
        CheckFailed, match=r"step 7: the loss of sequence 2 of 2 is inf; the optimizer has not moved"
    ) as caught:
        _step(model, good_then_bad, step=7)
    assert caught.value.exit_code == 3
    assert torch.equal(model.cost, before["cost"])


def test_a_gradient_that_is_not_finite_stops_before_anything_moves():
    model = Table([0.0, 0.0, 4.0, 1.0], power=0.5)  # the slope of a square root at 0
    before = weights(model)
    with pytest.raises(CheckFailed, match=r"step 3: the gradient norm of cost is (inf|nan); the optimizer"):
        _step(model, [Pack.from_documents([FIVE_CHEAP, ONE_DEAR])], step=3)
    assert torch.equal(model.cost, before["cost"])


def test_small_float32_tensors_of_a_bfloat16_model_stay_float32_and_frozen_ones_bit_equal():
    model = tiny_model(torch.bfloat16)
    kept = [name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32]
    assert {name.rsplit(".", 1)[-1] for name in kept} >= {
        "A_log",
        "dt_bias",
        "hc_attn_base",
        "e_score_correction_bias",
    }
    with torch.no_grad():
        for name in kept:
            model.state_dict()[name].fill_(1 + 2**-10)
    before = weights(model)
    _step(model, packs(40), settings(trainable=["dense", "experts"]))
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype, name
        learns = "mlp" in name and ".gate." not in name
        assert torch.equal(tensor, before[name]) != learns, name
