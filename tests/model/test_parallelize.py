"""Whole models whose experts are spread over ranks, against one process on all tokens."""

import pytest
import torch

from longstrand.bench._small_models import documents, gradients, largest_difference, model, upstream
from longstrand.data.pack import Pack
from longstrand.errors import UserError
from longstrand.memory import SideLosses
from longstrand.model.ffn import MixtureOfExperts, Router
from longstrand.model.parallelize import expert_parameter_names, expert_parts, spread_experts, spread_of
from longstrand.parallel import Axis, make_mesh, run_ranks

EXACT = 1e-10
NUM_EXPERTS = 8


def _model(kinds="KD", ties=False):
    drawn = model(kinds, n_routed_experts=NUM_EXPERTS)
    for name, value in [*drawn.named_parameters(), *drawn.named_buffers()]:
        if ties and ".mlp.gate." in name:
            value.data.zero_()
    return drawn


def _pack(rank, ties=False):
    """As many tokens on each rank, in other documents."""
    if ties:
        return Pack.from_documents([torch.full((32,), 5)])
    return Pack.from_documents(documents([(40, 1, 9), (3, 47), (50,), (17, 16, 17)][rank], seed=rank))


def _spread(model, axis, receive):
    spread = spread_of(model, axis, receive)
    spread_experts(model, spread)
    return spread


def _of_ranks(expert, receive, ties=False, noise=False):
    """Gradients of this rank's pack, its counts, what of the whole the experts here are, largest receive."""
    mesh = make_mesh(data=torch.distributed.get_world_size(), context=1, expert=expert)
    spread = _spread(drawn := _model("KDK" if not ties else "KD", ties), mesh.expert, receive)
    if noise:
        _add_noise()
    given, side = _pack(mesh.world.rank, ties), SideLosses(aux_scale=0.3)
    logprobs, grads = gradients(drawn, given, 8, side, upstream(len(given), mesh.world.rank))
    own = expert_parameter_names(drawn)
    for name in sorted(grads):  # what training does
        axis = mesh.expert_replicas if name in own else mesh.world
        grads[name] = axis.sum(grads[name].contiguous())
    return logprobs, grads, side.expert_counts, expert_parts(drawn), spread.largest_received


def _add_noise():
    """On every pass but the first, where there is no graph."""
    own, passes = Router.logits, []

    def noisy(self, x):
        passes.append(0)
        generator = torch.Generator().manual_seed(len(passes))
        noise = 1e-7 * torch.randn(len(x), NUM_EXPERTS, generator=generator, dtype=x.dtype)
        return own(self, x) + (noise if torch.is_grad_enabled() else 0)

    Router.logits = noisy  # of a process that ends with the test


def _whole(num_ranks, kinds, ties=False):
    """One process: the sum over all packs."""
    drawn, total, each = _model(kinds, ties), {}, []
    for rank in range(num_ranks):
        given, side = _pack(rank, ties), SideLosses(aux_scale=0.3)
        logprobs, grads = gradients(drawn, given, 8, side, upstream(len(given), rank))
        total = {name: total.get(name, 0) + grad for name, grad in grads.items()}
        each.append((logprobs, side.expert_counts))
    return each, total


def _gathered(ranks, expert):
    """Every parameter whole: experts from the ranks of the first expert group, the rest from any rank."""
    found, parts = dict(ranks[0][1]), ranks[0][3]
    for name, part in parts.items():
        found[name] = torch.cat([rank[1][name] for rank in ranks[:expert]])
        assert tuple(found[name].shape) == part.shape
        assert [rank[3][name].first for rank in ranks[:expert]] == [
            r * NUM_EXPERTS // expert for r in range(expert)
        ]
    return found


@pytest.mark.parametrize(("num_ranks", "expert", "receive"), [(2, 2, 5), (4, 4, 7), (4, 2, 1000)])
def test_every_gradient_is_that_of_one_process(num_ranks, expert, receive):
    """A09: nothing is divided by the ranks that share the experts; the router hears of experts elsewhere."""
    ranks = run_ranks(num_ranks, _of_ranks, expert, receive, start="fork", timeout=300)
    each, total = _whole(num_ranks, "KDK")
    for (logprobs, counts), (ours, _, our_counts, _, largest) in zip(each, ranks, strict=True):
        torch.testing.assert_close(ours, logprobs, rtol=0, atol=EXACT)
        assert all(torch.equal(our_counts[layer], counts[layer]) for layer in counts)
        assert 0 < largest <= receive
    error, where = largest_difference(_gathered(ranks, expert), total)
    assert error <= EXACT, where


@pytest.mark.parametrize("noise", [False, True])
def test_recompute_sends_tokens_to_the_experts_of_the_first_pass(noise):
    """A08: exact ties, and noise on every later pass; every rank's tokens go to the same experts."""
    ranks = run_ranks(2, _of_ranks, 2, 6, True, noise, start="fork", timeout=300)
    each, total = _whole(2, "KD", ties=True)
    for (_, counts), (_, _, our_counts, _, largest) in zip(each, ranks, strict=True):
        assert int(our_counts[1].sum()) == 32 * 2
        assert torch.equal(our_counts[1], counts[1])
        assert largest <= 6
    error, where = largest_difference(_gathered(ranks, 2), total)
    assert error <= (1e-5 if noise else EXACT), where


def _with_idle_ranks():
    """Rank 0 has three tiles, the others one and none; gradients of the whole mixture."""
    mesh = make_mesh(data=4, context=1, expert=4)
    drawn = _model()
    _spread(drawn, mesh.expert, 5)
    mixture, side = drawn.layers[1].mlp, SideLosses()
    tiles = _tiles()[mesh.world.rank]
    outs, kept = [], []
    with torch.no_grad():
        for x in tiles:
            kept.append(mixture.new_choices(len(x), x.device))
            outs.append(mixture.choose(x, kept[-1], side))
        for _ in range(3 - len(tiles)):
            mixture.idle(side, choose=True)
    for x, choices in zip(tiles, kept, strict=True):
        y, _ = mixture.recompute(x.requires_grad_(), choices)
        y.backward(x.detach().flip(0))
    for _ in range(3 - len(tiles)):
        mixture.idle(side, choose=False)()
    grads = {name: value.grad for name, value in mixture.named_parameters()}
    return outs, [x.grad for x in tiles], grads, side.expert_counts[1], mixture.spread.num_rounds


def _tiles():
    generator = torch.Generator().manual_seed(1)
    lengths = ([7, 3, 5], [4], [], [2, 6])
    return [[torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in each] for each in lengths]


def test_ranks_with_fewer_tiles_take_part_without_a_token():
    ranks = run_ranks(4, _with_idle_ranks, start="fork", timeout=200)
    mixture = _model().layers[1].mlp
    assert isinstance(mixture, MixtureOfExperts)
    for (outs, dxs, _, counts, _), tiles in zip(ranks, _tiles(), strict=True):
        side = SideLosses()
        mixture.idle(side, choose=True)  # alone there is no one to wait for
        assert not any(counts.any() for counts in side.expert_counts.values())
        for x, out, dx in zip(tiles, outs, dxs, strict=True):
            choices = mixture.new_choices(len(x), x.device)
            y = mixture.choose(x.requires_grad_(), choices, side)
            y.backward(x.detach().flip(0))
            torch.testing.assert_close(out, y.detach(), rtol=0, atol=EXACT)
            torch.testing.assert_close(dx, x.grad, rtol=0, atol=EXACT)
        assert int(counts.sum()) == 2 * sum(len(x) for x in tiles)
    total = {name: value.grad for name, value in mixture.named_parameters()}
    found = {}
    for name in total:
        grads = [grads[name] for _, _, grads, _, _ in ranks if grads[name] is not None]
        found[name] = torch.cat(grads) if name.startswith("experts.") else sum(grads)
    error, where = largest_difference(found, total)
    assert error <= EXACT, where
    assert len({rounds for *_, rounds in ranks}) == 1


def test_experts_that_the_axis_does_not_divide_are_refused():
    axis = Axis("expert")
    axis.size = 3
    with pytest.raises(UserError, match=r"parallel.expert = 3: must divide the model's 8 routed experts"):
        spread_of(_model(), axis, 100)


def test_a_model_whose_experts_are_whole_says_so():
    drawn = _model("KDK")
    parts = expert_parts(drawn)
    assert set(parts) == {
        f"layers.{layer}.mlp.experts.{leaf}" for layer in (1, 2) for leaf in ("gate_up_proj", "down_proj")
    }
    assert all(
        part.first == 0 and part.shape == drawn.get_parameter(name).shape for name, part in parts.items()
    )
    assert spread_of(drawn, Axis("expert"), 1) is None
    assert expert_parts(drawn) == parts
