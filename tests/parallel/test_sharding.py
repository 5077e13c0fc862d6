"""Weights sharded over ranks: gradients, norm and weights are those of one process with all packs."""

import dataclasses
import gc

import pytest
import torch
from tiny_training import TINY, documents, settings
from torch.distributed.tensor import DTensor

from longstrand.data import Pack
from longstrand.memory import Levers, SideLosses
from longstrand.model import load_model
from longstrand.model.parallelize import parallelize
from longstrand.parallel import as_stored, local_part, make_mesh, one_process, run_ranks
from longstrand.train import optimizer as optimizers
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names
from longstrand.train.step import _clip

PACKS = [
    Pack.from_documents(documents(*lengths, seed=seed))
    for seed, lengths in enumerate([(9, 14), (21,), (5,), (17, 3)])
]


def _model(dtype, tied, trainable, indexer="frozen"):
    model = load_model(dataclasses.replace(TINY, tie_word_embeddings=tied), dtype=dtype, seed=1)
    freeze_all_but(model, trained_names(model.groups(), settings(trainable=trainable, indexer=indexer)))
    return model


def _walk(model, packs, levers, indexer="frozen"):
    for pack in packs:
        side = SideLosses(indexer=indexer, indexer_scale=0.01)
        (-model.token_logprobs(pack, levers, side).double() * pack.weight).sum().backward()


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _gradients(model):
    """Whole, by name."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _sharded(packs_per_rank, tied, trainable, levers, indexer):
    mesh = make_mesh(data=2, context=1, expert=1)
    model = parallelize(_model(torch.float64, tied, trainable, indexer), mesh)
    first = mesh.data.rank * packs_per_rank
    _walk(model, PACKS[first : first + packs_per_rank], levers, indexer)
    return _gradients(model)


CASES = {  # packs per rank, tied embedding, what is trained, levers, indexer
    "all": (1, False, ["all"], Levers(tile=8), "sparse"),
    "two packs, tied": (2, True, ["all"], Levers(tile=5), "frozen"),
    "graphs kept": (1, False, ["all"], Levers(tile=8, recompute=False), "frozen"),
    "some groups, inputs rebuilt": (2, False, ["mla", "router"], Levers(tile=8, keep_every=2), "frozen"),
    "tied, embedding and mixers": (1, True, ["mla", "embedding"], Levers(tile=64), "frozen"),
    "warm-up": (2, False, ["all"], Levers(tile=8), "warmup"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_one_process_with_all_packs(case):
    packs_per_rank, tied, trainable, levers, indexer = case
    alone = _model(torch.float64, tied, trainable, indexer)
    _walk(alone, PACKS[: 2 * packs_per_rank], levers, indexer)
    expected = _gradients(alone)
    for found in run_ranks(2, _sharded, *case, start="fork", timeout=100):
        # Of a trained weight that nothing reached, shards hold zeros.
        for name in found.keys() | expected.keys():
            gradient = expected.get(name, torch.zeros_like(found[name]))
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10, msg=name)


def _bfloat16(model):
    return [name for name, parameter in model.named_parameters() if parameter.dtype == torch.bfloat16]


def _sharded_bfloat16(levers):
    mesh = make_mesh(data=2, context=1, expert=1)
    model = parallelize(_model(torch.bfloat16, False, ["all"]), mesh)
    _walk(model, PACKS[2 * mesh.data.rank : 2 * mesh.data.rank + 2], levers)
    kept = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    return _gradients(model), kept, _bfloat16(model)


def test_bfloat16_weights_get_float32_gradients_and_what_is_float32_stays_so():
    levers = Levers(tile=8)
    each = []
    for pack in PACKS:
        alone = _model(torch.bfloat16, False, ["all"])
        _walk(alone, [pack], levers)
        each.append(_gradients(alone))
    narrow = _bfloat16(alone)
    for found, kept, found_narrow in run_ranks(2, _sharded_bfloat16, levers, start="fork", timeout=100):
        assert found_narrow == narrow
        assert kept == {name for name, _ in alone.named_parameters()} - set(narrow)
        assert "layers.0.self_attn.A_log" in kept
        for name, gradient in found.items():
            if name in each[0]:  # nothing reaches the indexer's
                # First the first packs of both ranks, then the second ones: to the bit, if nothing was rounded.
                expected = (each[0][name] + each[2][name]) + (each[1][name] + each[3][name])
                assert expected.dtype == gradient.dtype == torch.float32
                torch.testing.assert_close(gradient, expected, rtol=0, atol=0, msg=name)


def _three_steps(dtype, on_host, mesh=None):
    mesh = mesh or make_mesh(data=2, context=1, expert=1)
    model = parallelize(_model(dtype, False, ["all"]), mesh)
    names = trained_names(model.groups(), settings())
    if on_host:
        optimizers._needs_copy = lambda part, device: True  # as if the parameters were on another device
    device = torch.device("cpu") if on_host else None
    optimizer = Optimizer(model, names, settings(weight_decay=0.1), device=device, mesh=mesh)
    share = len(PACKS) // mesh.data.size
    norms = []
    for _ in range(3):
        _walk(model, PACKS[mesh.data.rank * share : (mesh.data.rank + 1) * share], Levers(tile=64))
        norms.append(_clip(optimizer, 0.5, 1))
        optimizer.step(1e-2)
        optimizer.clear_gradients()
    held = {**model.state_dict(), **optimizer.tensors()}
    return norms, {name: whole(tensor) for name, tensor in held.items()}


@pytest.mark.parametrize(
    ("dtype", "on_host"), [(torch.float64, False), (torch.float64, True), (torch.bfloat16, False)]
)
def test_three_steps_end_at_the_weights_of_one_process(dtype, on_host):
    norms, weights = _three_steps(dtype, False, one_process())
    assert min(norms) > 0.5  # all are clipped
    for found_norms, found in run_ranks(2, _three_steps, dtype, on_host, start="fork", timeout=100):
        assert found_norms == pytest.approx(norms, rel=1e-12 if dtype == torch.float64 else 1e-2)
        assert found.keys() == weights.keys()
        for name, tensor in found.items():
            assert tensor.dtype == weights[name].dtype
            # Adam's step of a gradient near 0 turns on its rounding: bfloat16 runs part there.
            bound = 1e-9 if dtype == torch.float64 else 0.07
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=bound, msg=name)


def test_a_rank_holds_its_part_of_weights_gradients_and_moments():
    for held, total in run_ranks(3, _bytes_held, start="fork", timeout=100):
        assert held < 0.4 * total


def _storages():
    """Bytes of each float64 storage that the process knows, by its address."""
    gc.collect()
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype == torch.float64
    }


def _bytes_held():
    others = _storages()  # of what ran before in the process that this one is a copy of
    mesh = make_mesh(data=3, context=1, expert=1)
    model = _model(torch.float64, False, ["all"])
    total = 4 * sum(parameter.nbytes for parameter in model.parameters())
    model = parallelize(model, mesh)
    _walk(model, PACKS[:1], Levers(tile=8))
    optimizer = Optimizer(model, trained_names(model.groups(), settings()), settings(), mesh=mesh)
    optimizer.gradients()
    return sum(size for address, size in _storages().items() if address not in others), total


def _scores():
    mesh = make_mesh(data=2, context=1, expert=1)
    model = parallelize(_model(torch.float64, False, ["all"]), mesh)
    with torch.no_grad():
        return model.token_logprobs(PACKS[mesh.data.rank], Levers(tile=5)), model.hidden(
            PACKS[0], Levers(tile=5)
        )


def test_ranks_score_packs_of_different_lengths_without_gradients():
    alone = _model(torch.float64, False, ["all"])
    with torch.no_grad():
        for rank, (scores, hidden) in enumerate(run_ranks(2, _scores, start="fork", timeout=100)):
            torch.testing.assert_close(
                scores, alone.token_logprobs(PACKS[rank], Levers(tile=5)), rtol=0, atol=0
            )
            torch.testing.assert_close(hidden, alone.hidden(PACKS[0], Levers(tile=5)), rtol=0, atol=0)


def _changed_between():
    mesh = make_mesh(data=2, context=1, expert=1)
    model = parallelize(_model(torch.float64, False, ["all"]), mesh)
    logprobs = model.token_logprobs(PACKS[0], Levers(tile=8))
    with torch.no_grad():
        local_part(model.get_parameter("layers.2.mlp.shared_experts.up_proj.weight")).mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_a_weight_changed_between_a_pass_and_its_way_back_is_refused():
    run_ranks(2, _changed_between, start="fork", timeout=100)


def _experts_over_two_axes():
    """Four ranks, two of which hold the same half of the experts; gradients are set by hand."""
    mesh = make_mesh(data=4, context=1, expert=2)
    model = _model(torch.float64, False, ["all"])
    names = trained_names(model.groups(), settings())
    layer = next(layer for layer in model.layers if hasattr(layer.mlp, "experts"))
    experts = layer.mlp.experts
    parallelize(model, mesh)
    optimizer = Optimizer(model, names, settings(), mesh=mesh)
    layer.gather_weights()
    experts.down_proj.grad = torch.full_like(experts.down_proj, 1.0 + mesh.world.rank)
    layer.post_attention_layernorm.weight.grad = torch.ones_like(layer.post_attention_layernorm.weight)
    layer.reduce_gradients()
    layer.free_weights()
    (name,) = [name for name, p in model.named_parameters() if p is experts.down_proj]
    norms = {each: norm for each, norm in optimizer.norms().items() if norm}
    stored = as_stored(optimizer.gradients()[name], experts.down_proj, mesh)
    weight = as_stored(local_part(experts.down_proj), experts.down_proj, mesh)
    return name, norms, stored.full_tensor(), weight.full_tensor()


def test_experts_on_their_own_axis_are_summed_over_those_that_hold_the_same():
    alone = dict(_model(torch.float64, False, ["all"]).named_parameters())
    for name, norms, gradient, weight in run_ranks(4, _experts_over_two_axes, start="fork", timeout=100):
        expected = torch.empty_like(alone[name], requires_grad=False)
        half = len(expected) // 2
        expected[:half], expected[half:] = 1.0 + 3.0, 2.0 + 4.0  # of ranks 0 and 2, 1 and 3
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
        assert torch.equal(weight, alone[name])
        norm = name.replace("mlp.experts.down_proj", "post_attention_layernorm.weight")
        assert norms == pytest.approx(
            {name: float(expected.norm()), norm: 4 * len(alone[norm]) ** 0.5}, rel=1e-12
        )
