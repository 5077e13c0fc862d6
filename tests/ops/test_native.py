"""The CPU kernels: as exact as plain torch in float32 and bfloat16, whatever the sizes and threads."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from agreement import difference, errs_at_most_twice, is_as_exact_as_plain_torch, run
from test_sparse_attention import both, in_plain_torch

from longstrand.ops import experts, kda, mhc, native, select, short_conv, sparse_attention
from longstrand.ops.experts import cases as experts_cases
from longstrand.ops.kda import cases as kda_cases
from longstrand.ops.mhc import cases as mhc_cases
from longstrand.ops.norm import gated_rms_norm, rms_norm
from longstrand.ops.select import cases as select_cases
from longstrand.ops.short_conv import cases as conv_cases
from longstrand.ops.sparse_attention import cases as sparse_cases
from longstrand.ops.swiglu import swiglu

FLOOR = {torch.float32: 4.0, torch.bfloat16: 1.0}  # units of rounding; one of bfloat16's is 0.8 %
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def kernels_in_use():
    state = native.use_native("auto")
    if not state.used:
        pytest.skip(f"the CPU kernels cannot be built: {state.reason}")
    yield
    native.use_native("portable")


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@BOTH
@named([*mhc_cases.CASES, mhc_cases.MhcCase("whole vectors", length=50, width=48)])
def test_hyper_connections(case, dtype):
    inputs, settings = mhc_cases.draw(case), mhc_cases.settings(case)
    is_as_exact_as_plain_torch(
        lambda **given: mhc.mhc_gather(**given, **settings),
        lambda **given: mhc.mhc_gather_reference(**given, **settings),
        inputs,
        dtype,
        floor=FLOOR[dtype],
    )


@BOTH
@named(mhc_cases.CASES)
def test_hyper_connections_update(case, dtype):
    generator = torch.Generator().manual_seed(5)
    shapes = {"out": (case.length, case.width), "post": (case.length, case.streams)}
    shapes["comb"] = (case.length, case.streams, case.streams)
    more = {n: torch.randn(*s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    inputs = {"x": mhc_cases.draw(case)["x"], **more}
    is_as_exact_as_plain_torch(mhc.mhc_update, mhc.mhc_update_reference, inputs, dtype, floor=FLOOR[dtype])


@named([*kda_cases.CASES, kda_cases.KdaCase("whole vectors", 50, key=32, value=16)])
def test_kda(case):
    is_as_exact_as_plain_torch(
        kda.kda, kda.kda_reference, kda_cases.draw(case), floor=16.0, without="gradient of g"
    )


def test_kda_has_the_decays_gradient_to_its_own_bound():
    """Near -5 per token it is the difference of large terms."""
    for case in kda_cases.CASES:
        inputs = kda_cases.draw(case)
        found, truth = run(kda.kda, inputs, torch.float32), run(kda.kda_reference, inputs)
        assert difference(found["gradient of g"], truth["gradient of g"], 1e-6) <= 1e-4, case.name


def test_kda_reads_queries_that_lie_between_keys_and_values():
    """Views of one projection, not copies; their gradients go back to where they were read."""
    mixed = torch.randn(1, 37, 3, 2, 5, generator=torch.Generator().manual_seed(0))
    inputs = kda_cases.draw(kda_cases.KdaCase("", 37, heads=2, key=5, value=5))

    def views(mixed, g, beta, state):
        return kda.kda(*mixed.unbind(2), g, beta, state)

    def copies(mixed, g, beta, state):
        return kda.kda(*(part.contiguous() for part in mixed.unbind(2)), g, beta, state)

    given = {"mixed": mixed.double()} | {name: inputs[name] for name in ("g", "beta", "state")}
    found, wanted = run(views, given, torch.float32), run(copies, given, torch.float32)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@BOTH
@named(conv_cases.CASES)
def test_short_convolution(case, dtype):
    is_as_exact_as_plain_torch(
        short_conv.short_conv,
        short_conv.short_conv_reference,
        conv_cases.draw(case),
        dtype,
        floor=FLOOR[dtype],
    )


@BOTH
@named(experts_cases.CASES)
def test_experts(case, dtype):
    is_as_exact_as_plain_torch(
        lambda **given: experts.experts(**given, limit=case.limit),
        lambda **given: experts.experts_reference(**given, limit=case.limit),
        experts_cases.draw(case),
        dtype,
        floor=FLOOR[dtype],
    )


@BOTH
@named(sparse_cases.CASES)
def test_sparse_attention(case, dtype):
    inputs = sparse_cases.draw(case)
    inputs = {n: v.to(dtype).double() if v.is_floating_point() else v for n, v in inputs.items()}
    ours, truth = both(inputs, case.kpool, dtype)
    plain = in_plain_torch(inputs, case.kpool, dtype)
    errs_at_most_twice(ours, plain, truth, dtype, floor=FLOOR[dtype])


@named(select_cases.CASES)
def test_selection_is_that_of_plain_sorting_ties_to_the_lowest_id(case):
    inputs = select_cases.draw(case)
    inputs = {n: v.float() if v.is_floating_point() else v for n, v in inputs.items()}
    chosen = select.select_pools(**inputs, num_selected=case.num_selected)
    wanted = select.select_pools_reference(**inputs, num_selected=case.num_selected)
    assert torch.equal(chosen, wanted)


@pytest.mark.parametrize("score", ["equal", "rising", "falling", "few values", "any"])
def test_selection_among_thousands_of_pools_keeps_the_exact_best(score):
    """More pools than the running list holds, so that it is pruned many times."""
    generator = torch.Generator().manual_seed(1)
    pools, rows, count = 5003, 70, 20
    keys = torch.zeros(pools, 1)
    values = {
        "equal": torch.ones(pools),
        "rising": torch.arange(pools).float(),
        "falling": torch.arange(pools, 0, -1).float(),
        "few values": torch.randint(0, 5, (pools,), generator=generator).float(),
        "any": torch.rand(pools, generator=generator),
    }[score]
    keys[:, 0] = values
    first = torch.randint(0, 40, (rows,), generator=generator)
    visible = torch.randint(1, pools - 40, (rows,), generator=generator)
    one = torch.ones(rows, 1)
    chosen = select.select_pools(one.unsqueeze(-1), one, keys, first, visible, count)
    for t in range(rows):
        seen = range(int(first[t]), int(first[t] + visible[t]))
        best = sorted(sorted(seen, key=lambda pool: (-float(values[pool]), pool))[:count])
        assert chosen[t].tolist() == best + [-1] * (count - len(best))


@BOTH
@pytest.mark.parametrize("width", [1, 7, 32])
def test_rows(dtype, width):
    generator = torch.Generator().manual_seed(3)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def norm(x, weight):
        return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    inputs = {"x": noise(5, 3, width), "weight": 1 + 0.3 * noise(width)}
    is_as_exact_as_plain_torch(
        lambda x, weight: rms_norm(x, weight, 1e-5), norm, inputs, dtype, floor=FLOOR[dtype]
    )
    is_as_exact_as_plain_torch(
        lambda x, weight, gate: gated_rms_norm(x.float(), gate, weight, 1e-5),
        lambda x, weight, gate: norm(x, weight) * torch.sigmoid(gate),
        inputs | {"gate": noise(5, 3, width)},
        dtype,
        floor=FLOOR[dtype],
    )
    is_as_exact_as_plain_torch(
        lambda both: swiglu(both, 0.7),
        lambda both: (
            torch.nn.functional.silu(both[..., :width].clamp(max=0.7)) * both[..., width:].clamp(-0.7, 0.7)
        ),
        {"both": noise(9, 2 * width)},
        dtype,
        floor=FLOOR[dtype],
    )
    is_as_exact_as_plain_torch(
        lambda raw, a_log, bias: kda.log_decay(raw, a_log, bias, -5.0),
        lambda raw, a_log, bias: -5.0 * torch.sigmoid(a_log.exp()[:, None] * (raw + bias.view(3, width))),
        {"raw": noise(9, 3, width), "a_log": 0.3 * noise(3), "bias": noise(3 * width)},
        dtype,
        floor=FLOOR[dtype],
    )


def test_values_beyond_the_exponents_range_are_no_nan_and_nan_stays_nan():
    gate = torch.tensor([-1e30, -100.0, 0.0, 100.0, float("nan")])
    out = gated_rms_norm(torch.ones(5, 1), gate[:, None], torch.ones(1), 0.0)[:, 0]
    assert torch.allclose(out[:4], torch.sigmoid(gate[:4]), rtol=1e-6, atol=1e-30)
    assert out[4].isnan()


def test_the_number_of_threads_changes_nothing_but_the_order_of_sums():
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[2]); torch.set_num_threads(int(sys.argv[1]));"
        "from longstrand.ops import native; native.use_native('native');"
        "from longstrand.model import load_model; from longstrand.data.pack import Pack;"
        "from longstrand.memory import Levers; from longstrand.bench._steps import architecture;"
        "model = load_model(architecture('toy'), seed=0);"
        "pack = Pack.from_documents([torch.arange(150) % 256, torch.arange(77) % 7]);"
        "loss = model.token_logprobs(pack, Levers(tile=64)).sum(); loss.backward();"
        "print(repr(float(loss)), repr(sum(float(p.grad.double().abs().sum()) for p in model.parameters()"
        " if p.grad is not None)))"
    )
    found = []
    for threads in ("1", "2", "3"):
        done = subprocess.run(
            [sys.executable, "-c", script, threads, "."], capture_output=True, text=True, check=True
        )
        found.append([float(number) for number in done.stdout.split()])
    for one in found[1:]:
        assert one == pytest.approx(found[0], rel=1e-5)


def test_rows_beyond_two_to_the_31_values_are_read_and_written_where_they_lie():
    """A26: an offset in 32 bits wraps into other memory. Untouched zero pages cost nothing."""
    width, kpool = 512, 4
    rows = 2**31 // width + 4 * kpool
    latents, d_latents = (torch.from_numpy(np.zeros((rows, width), np.float32)) for _ in range(2))
    last = rows // kpool - 1
    near = {"latents": latents[-2 * kpool :], "d_latents": d_latents[-2 * kpool :]}
    near["latents"].copy_(torch.randn(2 * kpool, width, generator=torch.Generator().manual_seed(0)))
    query = torch.ones(1, 2, width, requires_grad=True)
    far_ids = {"pools": torch.tensor([[last - 1]], dtype=torch.int32), "slots": torch.tensor([rows - 2])}
    out, _ = sparse_attention.sparse_attention(query, latents, d_latents, **far_ids, kpool=kpool, scale=0.1)
    out.sum().backward()
    small = near["latents"].clone(), torch.zeros(2 * kpool, width)
    same = torch.ones(1, 2, width, requires_grad=True)
    ids = {"pools": torch.tensor([[0]], dtype=torch.int32), "slots": torch.tensor([2 * kpool - 2])}
    wanted, _ = sparse_attention.sparse_attention(same, *small, **ids, kpool=kpool, scale=0.1)
    wanted.sum().backward()
    assert torch.equal(out, wanted) and torch.equal(query.grad, same.grad)
    assert torch.equal(near["d_latents"], small[1]) and small[1].abs().sum() > 0
    first, visible = torch.tensor([last - 5]), torch.tensor([6])
    keys = latents.view(-1, kpool * width)[:, :width]  # never copied whole
    chosen = select.select_pools(torch.ones(1, 1, width), torch.ones(1, 1), keys, first, visible, 1)
    best = max(range(6), key=lambda p: float(keys[last - 5 + p].sum().relu()))
    assert chosen.tolist() == [[last - 5 + best]]
