"""Operations of a whole step: against torch's own counter on the real scan, the published scale, and by hand."""

import dataclasses
import json
from importlib import resources

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longstrand.architecture import Architecture
from longstrand.bench._small_models import architecture
from longstrand.bench._steps import random_pack
from longstrand.config import MemorySection, ParallelSection
from longstrand.memory import Levers, SideLosses
from longstrand.model import load_model
from longstrand.ops.kda.chunked import CHUNK as OPS_CHUNK
from longstrand.ops.native import use_native
from longstrand.ops.select.blockwise import POOL_BLOCK, ROW_BLOCK
from longstrand.ops.sparse_attention.gathered import GATHER_BYTES
from longstrand.plan import operations
from longstrand.plan.exchanges import dsa_received, kda_received, moe_received
from longstrand.plan.job import Job
from longstrand.plan.links import exchange_work, host_optimizer_work, offload_work
from longstrand.plan.operations import (
    elementwise_bytes,
    layer_products,
    memory_work,
    product_work,
    start_work,
)
from longstrand.plan.passes import Passes
from longstrand.train.optimizer import freeze_all_but

MILLION = 2**20
GLM = Architecture.from_hf(
    json.loads((resources.files("longstrand") / "configs/glm-5.3-flash.json").read_text())
)
WIDE_ENOUGH = {  # products of weights are nearly all there is to count
    "hidden_size": 96,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "vocab_size": 150,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
}


def _amounts(job):
    return {work.name: work.amount for work in product_work(Passes(job))}


def _counted(shape, tokens, trained, levers, side=None):
    """Operations of forward and backward of our model in plain torch, as torch counts them."""
    use_native("portable")
    model = load_model(shape, torch.float32, seed=0)
    groups = [
        group for group in model.groups() if trained == group or (trained == "all" and group != "indexer")
    ]
    freeze_all_but(model, [name for group in groups for name in model.groups()[group]])
    with FlopCounterMode(display=False) as counter:
        (-model.token_logprobs(random_pack(tokens, 150), levers=levers, side=side).sum()).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("kinds", "trained", "levers", "within"),
    [
        ("K", "all", {}, 0.002),
        ("D", "all", {}, 0.006),
        ("KDKD", "all", {}, 0.002),
        ("KDKD", "all", {"recompute": False}, 0.002),
        ("KDKD", "all", {"keep_every": 2}, 0.002),
        ("KDKD", "head", {}, 0.002),
        ("KDKD", "experts", {}, 0.02),  # gradients of the choices' weights, of which no parameter learns
    ],
)
def test_the_products_of_a_step_are_those_that_torch_counts(kinds, trained, levers, within):
    shape, tokens = dataclasses.replace(architecture(kinds), **WIDE_ENOUGH), 131
    counted = _counted(shape, tokens, trained, Levers(tile=32, **levers))
    job = Job(shape, tokens, dtype="float32", trainable=(trained,), memory=MemorySection(tile=32, **levers))
    assert sum(_amounts(job).values()) == pytest.approx(counted, rel=within)


def test_the_published_scale_of_a_million_tokens():
    """model-facts: about 160 GFLOP per token with backward: MoE 76, KDA projections 37, scoring 11.8."""
    job = Job(GLM, MILLION)
    passes, found = Passes(job), _amounts(job)
    assert sum(found.values()) / MILLION == pytest.approx(160e9, rel=0.01)
    assert found["scores"] / MILLION == pytest.approx(11.8e9, rel=0.01)
    moe = kda = 0.0
    for layer, kind in enumerate(GLM.layer_types):
        for term, times in layer_products(passes, layer):
            moe += term.forward * times * term.name.startswith("experts")
            kda += (
                term.forward
                * times
                * (term.kind == "projections" and kind == "linear_attention" and "KDA" in term.name)
            )
    assert moe == pytest.approx(76e9, rel=0.01)
    assert kda == pytest.approx(37e9, rel=0.03)


def test_the_blocks_are_those_of_the_ops():
    assert (operations.CHUNK, operations.ROW_BLOCK, operations.POOL_BLOCK, operations.GATHER_BYTES) == (
        OPS_CHUNK,
        ROW_BLOCK,
        POOL_BLOCK,
        GATHER_BYTES,
    )


def test_ranks_share_the_work_and_the_busiest_has_the_skewed_experts():
    one, many = (
        Job(
            GLM,
            MILLION,
            memory=MemorySection(keep_fronts=True),
            parallel=ParallelSection(context=c, expert=e),
        )
        for c, e in ((1, 1), (16, 8))
    )
    whole, part = _amounts(one), _amounts(many)
    for kind in ("scores", "attention", "head"):
        assert part[kind] == pytest.approx(whole[kind] / 16)
    routed = 42 * 8 * 6 * 4096 * 2048 * MILLION / 16  # once, in the 42 layers that have them
    # Forward, again with its tile, again with its round, and back for rows and weights.
    assert part["experts"] == pytest.approx(whole["experts"] / 16 + routed)
    skewed = _amounts(dataclasses.replace(many, data_skew=4.0))
    assert skewed["experts"] - part["experts"] == pytest.approx(3 * 5 * routed)
    assert skewed["projections"] == part["projections"]


def test_without_fronts_a_rank_computes_them_again():
    fronts, again = (
        Job(
            GLM,
            MILLION,
            memory=MemorySection(keep_fronts=keep),
            parallel=ParallelSection(context=8),
        )
        for keep in (True, False)
    )
    qkv, gates = 3 * 2 * 4096 * 8192, 2 * (2 * 4096 * 128 + 2 * 128 * 8192) + 2 * 4096 * 64
    latents = 2 * 4096 * 512 + 4 * 4096 * 128
    more = 34 * 2 * (qkv + gates) + 11 * 3 * latents
    found = _amounts(again)["projections"] - _amounts(fronts)["projections"]
    assert found == pytest.approx(more * MILLION / 8)


def test_inputs_that_were_not_kept_cost_forwards_of_the_layers_below():
    shape = architecture("KKKKKKK")
    assert Passes(Job(shape, 64, memory=MemorySection(keep_every=3))).rebuilt == {0, 1, 3, 4}
    upper = Job(shape, 64, trainable=("head",), memory=MemorySection(keep_every=3))
    assert Passes(upper).first == 7
    assert Passes(upper).rebuilt == frozenset()


def test_what_does_not_learn_below_has_one_pass():
    """Only the upper of two layers trains: the lower one runs forward, once."""
    shape = dataclasses.replace(architecture("KD"), mlp_layer_types=("dense", "sparse"))
    passes = Passes(Job(shape, 64, trainable=("mla",)))
    assert passes.first == 1
    assert [(p.forward, p.back) for p in map(passes.of, (0, 1))] == [(1, 0), (2, 1)]


def test_warming_up_an_indexer_attends_to_every_token():
    shape = architecture("D")
    plain, warm = (Job(shape, 4097, indexer=mode, dtype="float32") for mode in ("frozen", "warmup"))
    dense = 4 * shape.num_attention_heads * shape.kv_lora_rank * 4098 / 2
    assert _amounts(warm)["attention"] > dense * 4097
    assert _amounts(warm)["experts"] == pytest.approx(_amounts(plain)["experts"] / 4)


def test_in_a_warm_up_the_head_goes_forward_only():
    """Of two vocabularies, so that torch counts the head alone."""
    found = []
    for vocabulary in (150, 450):
        shape = dataclasses.replace(architecture("KD"), **WIDE_ENOUGH | {"vocab_size": vocabulary})
        side = SideLosses(indexer="warmup", indexer_scale=1.0)
        counted = _counted(shape, 131, "indexer", Levers(tile=32), side)
        job = Job(shape, 131, dtype="float32", indexer="warmup", memory=MemorySection(tile=32))
        logits = next(work.amount for work in memory_work(Passes(job)) if work.name == "elementwise")
        found.append((counted, sum(_amounts(job).values()), logits))
    counted, planned, logits = (more - less for less, more in zip(*found, strict=True))
    assert counted == planned == 2 * 96 * 300 * 131
    assert logits == pytest.approx(3 * 300 * 4 * 131)  # one pass over the logits


def test_bytes_of_an_odd_layer_by_hand():
    """Width 10, 3 streams, 3 heads of 8, dense 7, in bfloat16."""
    shape = dataclasses.replace(
        architecture("K"),
        hidden_size=10,
        hc_mult=3,
        linear_num_heads=3,
        linear_head_dim=8,
        intermediate_size=7,
    )
    streams = 2 * (4 * 30 + 4 * 10) * 2
    kda = 17 * 24 * 2 + 3 * 24 * 4
    assert elementwise_bytes(Job(shape, 9), 0) == streams + kda + 5 * 7 * 2


def test_small_tiles_cost_starts_and_passes_over_the_weights():
    small, large = (
        Passes(Job(GLM, 2**16, form="native", memory=MemorySection(tile=tile))) for tile in (512, 4096)
    )
    assert start_work(small).amount == pytest.approx(8 * start_work(large).amount)
    weights = [next(w.amount for w in memory_work(p) if w.name == "weights of tiles") for p in (small, large)]
    assert weights[0] == pytest.approx(8 * weights[1])


def test_a_sequence_of_an_odd_length_has_its_last_tile():
    job = Job(architecture("K"), 1001, memory=MemorySection(tile=100))
    assert Passes(job).tiles == 11
    ranks = dataclasses.replace(job, parallel=ParallelSection(context=3))
    assert Passes(ranks).tiles == 2 * 2  # two segments of 167 tokens


def test_the_optimizer_passes_over_what_this_rank_trains():
    job = Job(architecture("KD"), 64, dtype="float32", trainable=("head",), parallel=ParallelSection(data=2))
    (work,) = (w for w in memory_work(Passes(job)) if w.name == "optimizer")
    assert job.shape.vocab_size == 19  # the first of two ranks has ten rows
    own = 10 * job.shape.hidden_size
    assert work.amount == own * 10 * 4
    host = dataclasses.replace(job, memory=MemorySection(optimizer="host"))
    copies = host_optimizer_work(Passes(host))
    assert copies is not None
    assert copies.amount == own * 8
    assert {w.rate for w in memory_work(Passes(host)) if w.name == "optimizer"} == {"host memory"}


def test_layer_inputs_of_kda_are_read_three_times():
    """7 layers, 6 inputs above the first; 4 streams of 4,096 values in bfloat16; of the last mean one of them."""
    shape = dataclasses.replace(architecture("KKKKKKK"), hidden_size=4096)
    host = offload_work(Passes(Job(shape, 1000, memory=MemorySection(offload="host"))))
    assert host is not None
    assert host.amount == (6 * 3 * 4 + 1) * 4096 * 2 * 1000
    assert offload_work(Passes(Job(shape, 1000))) is None


def test_one_rank_exchanges_nothing_and_many_what_their_layers_do():
    assert exchange_work(Passes(Job(GLM, MILLION))) == []
    job = Job(GLM, MILLION, parallel=ParallelSection(context=64, expert=32), data_skew=4.0)
    found = {work.name: work for work in exchange_work(Passes(job))}
    gathered = MILLION * 512 + MILLION // 4 * 128
    latents = (
        11 * (gathered * 2 * 2 + MILLION * 512 * 4) * 63 / 64
    )  # there and back, and gradients of latents
    assert found["DSA latents"].amount == pytest.approx(latents, rel=1e-6)
    rows = 42 * MILLION / 64 * 8 * 31 / 32 * 7 * 4096 * 2  # 2 forward, 5 backward
    assert found["MoE tokens"].amount == pytest.approx(4 * rows)
    experts = 42 * 288 * 3 * 4096 * 2048
    others = [(w.num_values, w.itemsize) for w in job.weights() if w.trains and not w.is_expert]
    cut, whole = (sum(number for number, size in others if size == itemsize) for itemsize in (2, 4))
    # Two ranks hold the same nine experts; what stays float32 lies on all, and is summed for all.
    reduced = experts / 32 * 4 / 2 + (cut + 2 * whole) * 4 * 63 / 64
    assert found["gradients reduced"].amount == pytest.approx(reduced)
    assert found["gradients reduced"].span == 64
    assert found["MoE tokens"].span == 32


def test_what_a_layer_receives_by_hand():
    """Two segments, 4 ranks, 3 heads of 8, convolution of 4 taps, bfloat16."""
    shape = dataclasses.replace(
        architecture("K"), linear_num_heads=3, linear_head_dim=8, num_experts_per_tok=2
    )
    found = kda_received(shape, 2, 4, 2, 4)
    state = 2 * 3 * 8 * 8 * 4
    assert found["KDA: summaries and states", "forward"] == 3 * state * 3 // 4
    assert found["KDA: summaries and states", "backward"] == 2 * state * 3 // 4
    assert found["KDA: convolution inputs", "there and back"] == 2 * 2 * 3 * 3 * 24 * 2
    assert dsa_received(800, 40, 4, 2, 4, indexer_learns=False) == {
        ("DSA: latents and pool keys", "forward"): 840 * 2 * 3 // 4,
        ("DSA: latents and pool keys", "backward"): (840 * 2 + 800 * 4) * 3 // 4,
    }
    away = 100 * 2 * 3 // 4
    assert moe_received(shape, 100, 4, 2) == {
        ("MoE: tokens", "forward"): 2 * away * shape.hidden_size * 2,
        ("MoE: tokens", "backward"): 5 * away * shape.hidden_size * 2,
    }
