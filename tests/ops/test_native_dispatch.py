"""Which form runs, and what a kernel refuses to read."""

import pytest
import torch
from agreement import is_as_exact_as_plain_torch, run

from longstrand.bench import _small_models
from longstrand.memory import Levers
from longstrand.model.forms import plan_forms
from longstrand.model.given import Pass
from longstrand.ops import experts, kda, mhc, native, select, short_conv, sparse_attention
from longstrand.ops.experts import cases as experts_cases
from longstrand.ops.kda import cases as kda_cases
from longstrand.ops.logprob import LOGPROBS
from longstrand.ops.mhc import cases as mhc_cases
from longstrand.ops.native import library
from longstrand.ops.norm import GATED_NORM, gated_rms_norm, rms_norm
from longstrand.ops.padding import Tiles
from longstrand.ops.select import cases as select_cases
from longstrand.ops.short_conv import cases as conv_cases
from longstrand.ops.sparse_attention import cases as sparse_cases

SHAPE = {"kpool": 4, "scale": 0.3}


@pytest.fixture(autouse=True)
def kernels_in_use():
    state = native.use_native("auto")
    if not state.used:
        pytest.skip(f"the CPU kernels cannot be built: {state.reason}")


class Recorded:
    """The library, and the names of the kernels that were called."""

    def __init__(self, kernels):
        self.kernels, self.called = kernels, set()

    def __getattr__(self, name):
        self.called.add(name)
        return getattr(self.kernels, name)


@pytest.fixture
def called(monkeypatch):
    recorded = Recorded(library._library)
    monkeypatch.setattr(library, "_library", recorded)
    return recorded.called


def float32(inputs):
    return {
        n: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for n, v in inputs.items()
    }


def narrow(inputs):
    return {n: v.int() if v.dtype == torch.int64 else v for n, v in inputs.items()}


def test_float64_a_mixture_and_another_device_run_in_plain_torch_and_say_why():
    one = torch.ones(1)
    assert native.refusal(one, one) is None
    assert native.refusal(one.double()) == "float64 has no kernels"
    assert native.refusal(one, one.bfloat16()) == "float32 and bfloat16 together: a kernel takes one dtype"
    assert native.refusal(one.to("meta")) == "device is meta: no kernel of ours"
    native.use_native("portable")
    assert native.refusal(one) == "asked for portable"


def test_each_op_says_what_its_kernel_does_not_take():
    x = torch.ones(2, 5, 3)
    five = "5 streams: the kernel takes 1 to 4"
    assert mhc.UPDATE.refusal(x=x, out=x[:, 0], post=None, comb=None) == five
    assert mhc.GATHER.refusal(x=x, iterations=64) == five
    assert mhc.GATHER.refusal(x=x, iterations=65) == "65 iterations: the kernel takes up to 64"
    assert mhc.GATHER.refusal(x=x.double(), iterations=65) == "float64 has no kernels"
    assert GATED_NORM.refusal(x=x.bfloat16(), gate=x, weight=x) == "x is bfloat16: the kernel takes float32"
    assert GATED_NORM.refusal(x=x, gate=x.bfloat16(), weight=x) is None
    assert LOGPROBS.refusal(hidden=x, weight=x) == "it has no kernel"


def test_what_plain_torch_refuses_the_kernels_do_not_read():
    given = float32(experts_cases.draw(experts_cases.ExpertsCase("")))
    with pytest.raises(RuntimeError, match="same dtype"):
        experts.experts(**given | {"gate_up": given["gate_up"].bfloat16()}, limit=1.0)


def test_a_wrong_shape_or_dtype_is_refused_before_a_kernel_reads_it():
    native.require((3, 2), torch.float32, q=torch.ones(3, 2), k=None)
    with pytest.raises(ValueError, match=r"k has shape \(3, 3\), must be \(3, 2\)"):
        native.require((3, 2), torch.float32, q=torch.ones(3, 2), k=torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"k is torch.float64, must be torch.float32"):
        native.require((2,), torch.float32, q=torch.ones(2), k=torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    "op",
    [
        lambda wide, x: rms_norm(x, wide, 1e-5),
        lambda wide, x: gated_rms_norm(x, x, wide, 1e-5),
        lambda wide, x: kda.log_decay(x[None], wide[:2], wide.repeat(2), -5.0),
        lambda wide, x: short_conv.short_conv(x[None], wide[:, None].repeat(1, 3), x[None], torch.arange(2))[
            0
        ],
        lambda wide, x: mhc.mhc_update(x[None], x[:1], wide[None, :2], torch.ones(1, 2, 2)),
        lambda wide, x: experts.experts(
            x,
            torch.zeros(2, 1, dtype=torch.long),
            wide[:2, None],
            torch.ones(1, 2, 4),
            torch.ones(1, 4, 1),
            1.0,
        ),
    ],
    ids=["norm", "gated norm", "log decay", "short convolution", "hyper-connections", "experts"],
)
def test_a_float64_weight_beside_float32_is_refused(op):
    with pytest.raises(ValueError, match=r"is torch.float64, must be torch.float32"):
        op(torch.ones(4, dtype=torch.float64), torch.ones(2, 4))


def test_ids_of_32_bits_are_what_they_are_in_64():
    inputs = float32(conv_cases.draw(conv_cases.CASES[0]))
    assert torch.equal(short_conv.short_conv(**narrow(inputs))[0], short_conv.short_conv(**inputs)[0])
    inputs = float32(select_cases.draw(select_cases.SelectCase("", (67, 30))))
    chosen = select.select_pools(**inputs, num_selected=4)
    assert torch.equal(select.select_pools(**narrow(inputs), num_selected=4), chosen)
    inputs = float32(sparse_cases.draw(sparse_cases.SparseCase("", (23, 9)))) | {"d_latents": None}
    inputs_32 = inputs | {"slots": inputs["slots"].int()}
    out, _ = sparse_attention.sparse_attention(**inputs, **SHAPE)
    assert torch.equal(sparse_attention.sparse_attention(**inputs_32, **SHAPE)[0], out)


def test_latents_that_are_no_buffer_are_refused():
    """A gradient is added where they lie."""
    inputs = float32(sparse_cases.draw(sparse_cases.SparseCase("", (23,))))
    every_second = torch.zeros(*inputs["latents"].shape, 2)[..., 0]
    for wrong in ({"latents": every_second}, {"d_latents": every_second}):
        with pytest.raises(ValueError, match="must be contiguous"):
            sparse_attention.sparse_attention(**{"d_latents": None} | inputs | wrong, **SHAPE)
    with pytest.raises(ValueError, match=r"d_latents is torch.bfloat16"):
        d_latents = torch.zeros_like(inputs["latents"]).bfloat16()
        sparse_attention.sparse_attention(**inputs, d_latents=d_latents, **SHAPE)


def test_a_pool_without_a_key_is_refused():
    inputs = float32(select_cases.draw(select_cases.SelectCase("", (67,))))
    with pytest.raises(ValueError, match="beyond the 15"):
        select.select_pools(**inputs | {"keys": inputs["keys"][:15]}, num_selected=4)


def test_kda_takes_a_gradient_of_its_last_state_that_lies_in_another_order():
    inputs = float32(kda_cases.draw(kda_cases.KdaCase("", 21, heads=2, key=5, value=5)))
    inputs["state"].requires_grad_()
    _, last = kda.kda(**inputs)
    above = torch.randn(last.mT.shape, generator=torch.Generator().manual_seed(4)).mT
    (found,) = torch.autograd.grad(last, inputs["state"], above, retain_graph=True)
    (wanted,) = torch.autograd.grad(last, inputs["state"], above.contiguous())
    assert torch.equal(found, wanted)


def test_a_stride_of_a_dim_of_size_one_is_not_walked():
    """Two sequences of one token each, whose token stride is another's: contiguous in torch's eyes."""
    part = torch.randn(1, 2, 2, 5, generator=torch.Generator().manual_seed(0))
    odd, plain = part.transpose(0, 1), part.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    assert odd.is_contiguous() and odd.stride() != plain.stride()
    more = {"beta": torch.full((2, 1, 2), 0.7), "state": torch.zeros(2, 2, 5, 5)}
    found, wanted = (kda.kda(q=x, k=x, v=x, g=-x.abs(), **more)[0] for x in (odd, plain))
    assert torch.equal(found, wanted)
    taps, tail, offsets = torch.ones(10, 3), torch.zeros(2, 2, 10), torch.zeros(1, dtype=torch.long)
    rows = odd.as_strided((2, 1, 10), (10, 20, 1)), plain.reshape(2, 1, 10)
    found, wanted = (short_conv.short_conv(x, taps, tail, offsets)[0] for x in rows)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("iterations", [64, 65])
def test_hyper_connections_with_more_iterations_than_the_kernel_holds_run_in_plain_torch(iterations, called):
    case = mhc_cases.MhcCase("", iterations=iterations)
    inputs, settings = mhc_cases.draw(case), mhc_cases.settings(case)
    is_as_exact_as_plain_torch(
        lambda **given: mhc.mhc_gather(**given, **settings),
        lambda **given: mhc.mhc_gather_reference(**given, **settings),
        inputs,
    )
    assert ("mhc_gather_backward_float32" in called) == (iterations == 64)


KERNELS = {  # what each op's kernels are called, where it has any
    "rms_norm": "rms_norm_forward",
    "gated_rms_norm": "gated_norm_forward",
    "log_decay": "log_decay_forward",
    "kda": "kda_forward",
    "short_conv": "short_conv_forward",
    "mhc_gather": "mhc_gather_forward",
    "mhc_update": "mhc_update_forward",
    "select_pools": "select_pools",
    "sparse_attention": "sparse_attention_forward",
    "experts": "experts_combine",
    "swiglu": "swiglu_forward",
}


def planned(model, dtype):
    """The form of each op, which is the same in every layer that has it."""
    plan = plan_forms(model.architecture, Pass(dtype, Tiles([(0, 93)], 32)))
    return {op.op.name: op.as_dict("cpu")["runs_in"] for _, op in plan}


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float64, {}),
        (torch.float32, {"hc_mult": 5}),
        (torch.float32, {"hc_sinkhorn_iters": 64}),
        (torch.float32, {"hc_sinkhorn_iters": 65}),
    ],
    ids=str,
)
def test_what_is_reported_to_run_is_what_runs(dtype, changes, called):
    model = _small_models.model(dtype=dtype, **changes)
    model.token_logprobs(_small_models.pack((23, 70)), Levers(tile=32)).sum().backward()
    reported = {op for op, form in planned(model, dtype).items() if form == "native C++ (cpu)"}
    assert reported == {op for op, name in KERNELS.items() if any(x.startswith(name) for x in called)}
    assert ("kda" in reported) == (dtype != torch.float64)


def test_what_is_reported_names_the_portable_form():
    native.use_native("portable")
    reported = planned(_small_models.model(dtype=torch.float32), torch.float32)
    assert reported["mhc_gather"] == "torch fused (cpu)" and reported["rms_norm"] == "torch eager (cpu)"


def test_a_run_through_mixed_dtypes_of_kda_widens_each():
    inputs = kda_cases.draw(kda_cases.KdaCase("", 21))
    halves = {n: inputs[n].bfloat16() for n in ("q", "k", "v")}
    mixed = float32(inputs) | halves
    wide = run(kda.kda, float32(inputs) | float32(halves), torch.float32)["output 0"]
    assert torch.equal(kda.kda(**mixed)[0], wide)
