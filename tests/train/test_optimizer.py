"""AdamW against its formula, masters against bfloat16, and what stays frozen."""

import pytest
import torch
from torch import nn

from longstrand.config import TrainSection
from longstrand.errors import UserError
from longstrand.train import optimizer as optimizers
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names

NAMES = {
    "norms": ["norm.weight"],
    "kda": ["layers.0.self_attn.A_log", "layers.0.self_attn.dt_bias", "layers.0.self_attn.q_conv1d.weight"],
    "indexer": [
        "layers.1.self_attn.indexer.index_kpool_compress_ape",
        "layers.1.self_attn.indexer.wq_b.weight",
    ],
    "dense": ["layers.0.mlp.up_proj.weight"],
    "router": [],
}


class Weights(nn.Module):
    """A bag of parameters under the checkpoint's names."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self._held = {
            n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in shapes.items()
        }

    def named_parameters(self, *args, **kwargs):
        yield from self._held.items()


@pytest.fixture
def host_optimizer(monkeypatch):
    """An optimizer on the host for parameters that pass for those of another device."""

    def build(model, names, settings, threads=1):
        with monkeypatch.context() as patch:
            patch.setattr(optimizers, "_needs_copy", lambda parameter, device: True)
            return Optimizer(model, names, settings, device=torch.device("cpu"), threads=threads)

    return build


def _settings(**values):
    return TrainSection(**{"steps": 10, "lr": 1e-3, "schedule": "constant", **values})


def _all_weights(dtype=torch.float32):
    shapes = {n: (5, 7) for names in NAMES.values() for n in names}
    for name in ("norm.weight", "layers.0.self_attn.A_log", "layers.0.self_attn.dt_bias"):
        shapes[name] = (7,)
    return Weights(shapes, dtype)


def _adamw(weight, gradients, lr, betas, eps, decay):
    """AdamW from its paper, in float64."""
    m, v, w = torch.zeros_like(weight).double(), torch.zeros_like(weight).double(), weight.double()
    for t, g in enumerate(gradients, start=1):
        g = g.double()
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        w = w - lr * decay * w - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    return w


def test_updates_follow_adamw_with_decay_on_matrices_only():
    model = _all_weights()
    names = [name for name, _ in model.named_parameters()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, names, _settings(weight_decay=0.1))
    gradients = {name: [torch.randn_like(p) for _ in range(3)] for name, p in model.named_parameters()}
    for turn in range(3):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name][turn].clone()
        optimizer.step(1e-3)
    undecayed = ("norm.weight", "A_log", "dt_bias", "compress_ape")
    for name, parameter in model.named_parameters():
        decay = 0.0 if name.endswith(undecayed) else 0.1
        expected = _adamw(before[name], gradients[name], 1e-3, (0.9, 0.95), 1e-8, decay)
        # Three updates round a weight twice each, by half a spacing; the step itself is 1e-3 and rounds far less.
        torch.testing.assert_close(parameter.double(), expected, rtol=6 * 2**-24, atol=1e-8, msg=name)


def test_a_bfloat16_weight_moves_by_steps_smaller_than_its_spacing():
    model = Weights({"w": (3, 2)}, torch.bfloat16)
    weight = dict(model.named_parameters())["w"]
    weight.grad_dtype = torch.float32
    with torch.no_grad():
        weight.fill_(1.0)
    optimizer = Optimizer(model, ["w"], _settings())
    for _ in range(100):
        weight.grad = torch.ones(3, 2)
        optimizer.step(1e-3)
    assert optimizer.masters["w"].dtype == torch.float32
    torch.testing.assert_close(optimizer.masters["w"], torch.full((3, 2), 0.9), rtol=0, atol=2e-5)
    assert torch.equal(weight, optimizer.masters["w"].bfloat16())


def test_moments_of_a_bfloat16_weight_are_float32_and_float32_weights_have_no_master():
    model = Weights({"w": (3, 2)}, torch.bfloat16)
    state = Optimizer(model, ["w"], _settings()).tensors()
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        "exp_avg.w": torch.float32, "exp_avg_sq.w": torch.float32, "master.w": torch.float32,
    }  # fmt: skip
    assert Optimizer(Weights({"w": (3, 2)}), ["w"], _settings()).masters == {}


def test_frozen_parameters_stay_bit_equal_under_weight_decay():
    model = _all_weights()
    names = trained_names(NAMES, _settings(trainable=["dense"]))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    freeze_all_but(model, names)
    optimizer = Optimizer(model, names, _settings(weight_decay=0.5))
    for _ in range(2):
        sum((p * p).sum() for _, p in model.named_parameters()).backward()
        optimizer.step(1e-2)
        optimizer.clear_gradients()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"layers.0.mlp.up_proj.weight"}
    assert all(p.grad is None for _, p in model.named_parameters())


def test_a_parameter_that_nothing_reached_gets_zeros():
    model = Weights({"w": (3, 2)}, torch.bfloat16)
    gradient = Optimizer(model, ["w"], _settings()).gradients()["w"]
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.zeros(3, 2))


def test_a_frozen_indexer_is_left_out_of_all():
    chosen = trained_names(NAMES, _settings())
    assert set(chosen) == {name for group in ("norms", "kda", "dense") for name in NAMES[group]}


def test_a_sparse_indexer_learns_with_everything():
    assert set(NAMES["indexer"]) < set(trained_names(NAMES, _settings(indexer="sparse")))


def test_in_a_warm_up_only_the_indexer_learns():
    assert trained_names(NAMES, _settings(indexer="warmup")) == NAMES["indexer"]


def test_a_group_without_parameters_is_refused_by_name():
    with pytest.raises(
        UserError, match=r'no parameters in group "router"; its groups are norms, kda, indexer, dense$'
    ):
        trained_names(NAMES, _settings(trainable=["router"]))


def test_nothing_left_to_train_is_refused():
    with pytest.raises(UserError, match="nothing is left to train"):
        trained_names({"dense": ["a"], "indexer": []}, _settings(indexer="warmup"))


def test_continuing_from_saved_tensors_gives_the_same_next_update():
    settings = _settings(weight_decay=0.1)
    gradients = [torch.randn(3, 2) for _ in range(4)]

    def run(model, optimizer, some):
        for gradient in some:
            for _, parameter in model.named_parameters():
                parameter.grad = gradient.clone()
            optimizer.step(1e-2)

    straight = Weights({"w": (3, 2)})
    one = Optimizer(straight, ["w"], settings)
    run(straight, one, gradients)

    stopped = Weights({"w": (3, 2)})
    two = Optimizer(stopped, ["w"], settings)
    run(stopped, two, gradients[:2])
    resumed = Weights({"w": (3, 2)})
    three = Optimizer(resumed, ["w"], settings)
    with torch.no_grad():
        dict(resumed.named_parameters())["w"].copy_(dict(stopped.named_parameters())["w"])
        for name, tensor in three.tensors().items():
            tensor.copy_(two.tensors()[name])
    three.continue_from(two.updates)
    run(resumed, three, gradients[2:])
    assert torch.equal(dict(resumed.named_parameters())["w"], dict(straight.named_parameters())["w"])
    assert torch.equal(three.tensors()["exp_avg_sq.w"], one.tensors()["exp_avg_sq.w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_host_optimizer_moves_every_weight_to_the_bits_that_a_device_one_does(dtype, host_optimizer):
    """On one machine both add the same numbers; its copies and threads are its own."""
    models = [_all_weights(dtype), _all_weights(dtype)]
    names = [name for name, _ in models[0].named_parameters()]
    settings, threads = _settings(weight_decay=0.1), torch.get_num_threads()
    plain = Optimizer(models[0], names, settings)
    host = host_optimizer(models[1], names, settings, threads=2)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for turn in range(4):
        gradients = {name: torch.randn_like(p, dtype=wide) for name, p in models[0].named_parameters()}
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.grad_dtype = wide
                parameter.grad = gradients[name].clone() if name != "norm.weight" else None
        plain.step(1e-2)
        host.step(1e-2)
        if turn == 1:  # as after a checkpoint: parameters and state are filled in place
            for name, tensor in plain.tensors().items():
                host.tensors()[name].copy_(tensor)
            host.continue_from(2)
    assert torch.get_num_threads() == threads
    assert plain.tensors().keys() == host.tensors().keys()
    assert all(torch.equal(host.tensors()[name], value) for name, value in plain.tensors().items())
    for (name, first), (_, second) in zip(*(m.named_parameters() for m in models), strict=True):
        assert torch.equal(first, second), name


def test_a_host_optimizer_moves_from_the_weights_as_they_are_at_each_step(host_optimizer):
    """A checkpoint is loaded into the parameters; the copies on the host follow."""
    models = [Weights({"w": (3, 2)}), Weights({"w": (3, 2)})]
    both = [Optimizer(models[0], ["w"], _settings()), host_optimizer(models[1], ["w"], _settings())]
    for model, optimizer in zip(models, both, strict=True):
        weight = dict(model.named_parameters())["w"]
        weight.data.fill_(3.0)
        weight.grad = torch.ones(3, 2)
        optimizer.step(0.5)
    first, second = (dict(model.named_parameters())["w"] for model in models)
    assert torch.equal(first, second) and float(first.detach()[0, 0]) == pytest.approx(2.5)


def test_a_host_optimizers_state_shares_no_memory_with_the_parameters(host_optimizer):
    model = Weights({"w": (3, 2)})
    optimizer = host_optimizer(model, ["w"], _settings())
    weight = dict(model.named_parameters())["w"]
    held = [*optimizer.copies.values(), *optimizer.tensors().values()]
    assert len(held) == 3 and all(tensor.data_ptr() != weight.data_ptr() for tensor in held)
    assert all(tensor.device.type == "cpu" for tensor in held)


def test_only_what_is_narrow_or_elsewhere_is_copied_and_straight_to_where_the_state_is():
    """The meta device stands for an accelerator: it holds nothing, so a wide copy on it could not be read."""
    own = Weights({"w": (3, 2)})
    assert Optimizer(own, ["w"], _settings(), device=torch.device("cpu")).copies == {}
    meta = torch.device("meta")
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32)):
        optimizer = Optimizer(Weights({"w": (3, 2)}, dtype), ["w"], _settings(), device=meta)
        held = [*optimizer.copies.values(), *optimizer.tensors().values()]
        assert {(tensor.device, tensor.dtype) for tensor in held} == {(meta, wide)}
        assert list(optimizer.masters) == (["w"] if dtype == torch.bfloat16 else [])
