"""Faults that other people's stacks had, each as a test of the whole model with its right value.

Faults of a single operation stand with that operation (tests/ops); docs/numerics.md lists where each one is.
"""

import pytest
import torch

from longstrand.bench._small_models import documents, gradients, largest_difference, model, train_only
from longstrand.data.pack import Pack
from longstrand.memory import Levers, SideLosses
from longstrand.model.ffn import Router

LENGTHS = (30, 3, 17)


@pytest.fixture
def fresh_memory_is_nan():
    """`torch.empty` and its kin come filled with NaN, or with the largest integer."""
    was = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = was[0]
    torch.use_deterministic_algorithms(was[1])


def test_recompute_reuses_the_experts_of_the_first_pass(monkeypatch):
    """A08: exact ties, and noise on every later pass. The choice, the counts and all gradients stay."""
    trained = model("KD", n_routed_experts=8)
    trained.get_parameter("layers.1.mlp.gate.weight").data.zero_()
    trained.get_buffer("layers.1.mlp.gate.e_score_correction_bias").zero_()
    given = Pack.from_documents([torch.full((32,), 5)])
    calm = SideLosses(aux_scale=0.1)
    _, without_noise = gradients(trained, given, 8, calm)
    own, passes = Router.logits, []

    def noisy(self, x):
        passes.append(torch.is_grad_enabled())
        logits = own(self, x)
        if not torch.is_grad_enabled():
            return logits
        generator = torch.Generator().manual_seed(len(passes))
        return logits + 1e-7 * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)

    monkeypatch.setattr(Router, "logits", noisy)
    side = SideLosses(aux_scale=0.1)
    _, with_noise = gradients(trained, given, 8, side)
    assert passes == [False] * 4 + [True] * 4
    assert int(side.expert_counts[1].sum()) == 32 * 2
    assert torch.equal(side.expert_counts[1], calm.expert_counts[1])
    error, where = largest_difference(with_noise, without_noise)
    assert error <= 1e-5, where
    unused = (side.expert_counts[1] == 0).nonzero()[:, 0]
    assert torch.equal(
        with_noise["layers.1.mlp.experts.down_proj"][unused],
        torch.zeros_like(with_noise["layers.1.mlp.experts.down_proj"][unused]),
    )


def test_recompute_reuses_the_pools_of_the_first_pass(monkeypatch):
    trained, given = model("DD"), Pack.from_documents(documents((67,)))
    _, before = gradients(trained, given, 16)
    attention = trained.layers[0].self_attn
    own, calls = type(attention).select, []

    def select(self, *args):
        calls.append(torch.is_grad_enabled())
        return own(self, *args)

    monkeypatch.setattr(type(attention), "select", select)
    _, after = gradients(trained, given, 16)
    assert calls == [False] * 5  # one per tile, all in the first pass
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 20, 41])
@pytest.mark.parametrize("scores", ["random", "equal", "negative"])
def test_tokens_after_a_position_never_change_it(length, scores):
    """A11: hidden pools as filler would leak the future; index_topk = 16, kpool = 4."""
    trained = model("DKD", index_topk=16)
    for name, value in trained.named_parameters():
        if name.endswith("weights_proj.weight"):
            value.data.mul_({"random": 1.0, "equal": 0.0, "negative": -50.0}[scores])
    (tokens,) = documents((length,))
    with torch.no_grad():
        before = trained.hidden(Pack.from_documents([tokens]), levers=Levers(tile=6))
        assert before.isfinite().all()
        for position in {0, length // 2, length - 1}:
            other = tokens.clone()
            other[position:] = (other[position:] + 1) % 19
            after = trained.hidden(Pack.from_documents([other]), levers=Levers(tile=6))
            assert torch.allclose(before[:position], after[:position], rtol=0, atol=1e-12)
            assert not torch.allclose(before[position], after[position], atol=1e-3)


@pytest.mark.parametrize("before", [1, 5, 64])
def test_what_stands_before_a_document_has_no_effect_on_it(before):
    """A23: there is no padding; what could play its part is another document, with any content."""
    trained = model("KDDK")
    (tokens,) = documents((20,))
    found = []
    for filler in (torch.zeros(before, dtype=torch.long), torch.full((before,), 7)):
        given = Pack.from_documents([filler, tokens, filler])
        weight = torch.zeros(len(given), dtype=torch.float64)
        weight[before : before + 20] = 1
        logprobs, grads = gradients(trained, given, 9, weight=weight)
        found.append(grads | {"log-probabilities": logprobs[before : before + 20]})
    alone, grads = gradients(trained, Pack.from_documents([tokens]), 9, weight=torch.ones(20))
    found.append(grads | {"log-probabilities": alone})
    for other in found[:2]:
        error, where = largest_difference(other, found[2])
        assert error <= 1e-10, where


def test_all_zero_inputs_have_finite_gradients():
    """A23: the gradient of a norm explodes on all-zero vectors."""
    trained = model("KDDK", dtype=torch.float32)
    trained.embed_tokens.weight.data[3] = 0
    given = Pack.from_documents([torch.tensor([3, 3, 3, 3, 3, 1, 3])])
    logprobs, grads = gradients(trained, given, 2)
    assert logprobs.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("period", [1, 2])
def test_a_run_of_one_letter_trains_in_float32_as_in_float64(period):
    """Repeated keys with beta near 0 and 1, through a whole stack: gradients within 1e-3 of the truth."""
    found = []
    for dtype in (torch.float32, torch.float64):
        trained = model("KKK", dtype=dtype, n_routed_experts=2)
        for name, value in trained.named_parameters():
            if name.endswith("self_attn.b_proj.weight"):
                value.data.mul_(30)
        given = Pack.from_documents([torch.tensor([5, 11][:period]).repeat(150 // period)])
        logprobs, grads = gradients(trained, given, 64, weight=torch.ones(len(given)))
        found.append(grads | {"log-probabilities": logprobs})
    error, where = largest_difference(found[0], found[1], scale=1e-3)
    assert error <= 1e-3, where


def test_autograd_grad_of_a_layers_parameter_is_refused():
    """The scan hands gradients to parameters itself; asking autograd for them must not give zeros."""
    trained, given = model("KD"), Pack.from_documents(documents((9,)))
    loss = trained.token_logprobs(given, levers=Levers(tile=4)).sum()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, trained.get_parameter("layers.0.self_attn.q_proj.weight"))


@pytest.mark.parametrize("mode", ["frozen", "sparse", "warmup"])
def test_fresh_memory_is_written_before_it_is_read(mode, fresh_memory_is_nan):
    """R17 and A29: buffers come filled with NaN and the largest id; twice in a row."""
    trained = train_only(model("KDDK"), *(["indexer"] if mode == "warmup" else []))
    given = Pack.from_documents(documents(LENGTHS))

    def run():
        side = SideLosses(indexer=mode, indexer_scale=0.0 if mode == "frozen" else 0.1)
        logprobs, grads = gradients(trained, given, 16, side)
        return grads | {"log-probabilities": logprobs}

    poisoned = [run(), run()]
    torch.use_deterministic_algorithms(False)
    clean = run()
    for found in poisoned:
        error, where = largest_difference(found, clean)
        assert error <= 1e-10, where


def test_a_step_in_which_one_expert_gets_every_token_is_finite_twice_in_a_row():
    """A29 in the model: all other experts have a gradient of exactly zero."""
    trained = model("KD", num_experts_per_tok=1)
    trained.get_buffer("layers.1.mlp.gate.e_score_correction_bias").copy_(torch.tensor([9.0, 0, 0, 0, 0, 0]))
    for lengths in ((20,), (1,)):
        for _ in range(2):
            _, grads = gradients(trained, Pack.from_documents(documents(lengths)), 8)
            for name in ("gate_up_proj", "down_proj"):
                grad = grads[f"layers.1.mlp.experts.{name}"]
                assert grad.isfinite().all()
                assert torch.equal(grad[1:], torch.zeros_like(grad[1:]))


@pytest.mark.parametrize("view", ["expanded", "strided", "own"])
def test_an_upstream_gradient_may_be_any_view(view):
    """A28: dx overwrites dy tile by tile; a view that shares its memory must come out as it went in."""
    trained, given = model("KDDK"), Pack.from_documents(documents(LENGTHS))
    size = (len(given), trained.architecture.hidden_size)
    row = torch.randn(size[1], dtype=torch.float64)
    upstream = {
        "expanded": row.expand(size),
        "strided": torch.stack([row.expand(size), torch.zeros(size)], dim=-1)[..., 0],
        "own": row.expand(size).contiguous(),
    }[view]
    kept = upstream.clone()
    trained.hidden(given, levers=Levers(tile=9)).backward(upstream)
    found = {name: p.grad for name, p in trained.named_parameters() if p.grad is not None}
    trained.zero_grad(set_to_none=True)
    (trained.hidden(given, levers=Levers(tile=9)) * row).sum().backward()
    assert torch.equal(upstream, kept)
    assert all(torch.equal(found[name], trained.get_parameter(name).grad) for name in found)


def test_two_passes_may_be_open_at_once_and_walked_back_in_any_order():
    """A28: what one pass keeps is its own."""
    trained = model("KDDK")
    packs = [Pack.from_documents(documents(LENGTHS, seed)) for seed in (1, 2)]
    wanted = [gradients(trained, given, 9, weight=torch.ones(len(given)))[1] for given in packs]
    open_passes = [trained.token_logprobs(given, levers=Levers(tile=9)) for given in packs]
    for logprobs in open_passes:
        logprobs.sum().backward()
    for name in wanted[0]:
        together = wanted[0][name] + wanted[1][name]
        assert torch.allclose(trained.get_parameter(name).grad, together, rtol=1e-12, atol=1e-12), name


def test_a_second_walk_back_is_refused():
    trained, given = model("KD"), Pack.from_documents(documents((9,)))
    loss = trained.token_logprobs(given, levers=Levers(tile=4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises((RuntimeError, KeyError)):
        loss.backward()


def test_without_a_graph_nothing_is_kept_and_nothing_is_trained():
    trained, given = model("KD"), Pack.from_documents(documents((9,)))
    with torch.no_grad():
        assert not trained.token_logprobs(given).requires_grad
    train_only(trained, "none")
    assert not trained.token_logprobs(given).requires_grad


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1)])
def test_a_pack_without_a_target_adds_zeros(lengths):
    """A06: gradients are zeros, not None and not NaN."""
    trained = model("KDDK")
    logprobs, grads = gradients(trained, Pack.from_documents(documents(lengths)), 2)
    assert torch.equal(logprobs, torch.zeros_like(logprobs))
    assert grads.keys() == {name for name, _ in trained.named_parameters() if ".indexer." not in name}
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads.values())


@pytest.mark.parametrize(
    "group", ["embedding", "head", "norms", "mhc", "kda", "mla", "router", "experts", "dense"]
)
def test_a_group_trained_alone_gets_the_gradient_it_gets_among_all(group):
    trained, given = model("KDDK"), Pack.from_documents(documents(LENGTHS))
    _, among_all = gradients(trained, given, 16)
    _, alone = gradients(train_only(trained, group), given, 16)
    assert set(alone) == set(trained.groups()[group])
    for name, grad in alone.items():
        assert torch.allclose(grad, among_all[name], rtol=1e-12, atol=1e-12), name


def test_gradients_of_several_packs_add_up():
    """A01's arithmetic: token sums over packs, one division by the caller."""
    trained, each = model("KDK"), documents((9, 4, 1, 12))
    together = gradients(trained, Pack.from_documents(each), 5, weight=torch.ones(26))[1]
    for document in each:
        trained.token_logprobs(Pack.from_documents([document]), levers=Levers(tile=5)).sum().backward()
    for name, grad in together.items():
        assert torch.allclose(trained.get_parameter(name).grad, grad, rtol=1e-11, atol=1e-11), name


def test_a_layers_input_survives_the_walk_back_of_the_layer_above():
    """The streams are views of one buffer per layer; two runs on the same tokens are equal bit by bit."""
    trained, given = model("KKDD"), Pack.from_documents(documents(LENGTHS))
    first, second = (gradients(trained, given, 7) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
