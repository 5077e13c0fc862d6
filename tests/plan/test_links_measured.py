"""Planned streams, exchanges and operations against those of a pass: its medium, its axes, torch's counter."""

import dataclasses
from collections import Counter
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longstrand.bench._small_models import architecture
from longstrand.bench._steps import random_pack
from longstrand.config import MemorySection, ParallelSection, TrainSection
from longstrand.memory import Levers
from longstrand.memory.spool import Spool
from longstrand.model import load_model
from longstrand.model.parallelize import parallelize
from longstrand.model.shards import Shards
from longstrand.ops.native import use_native
from longstrand.parallel import make_mesh, run_ranks
from longstrand.plan.job import Job
from longstrand.plan.links import exchange_work, latents_received, offload_work
from longstrand.plan.operations import product_work
from longstrand.plan.passes import Passes
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names
from longstrand.train.step import take_step

VOCABULARY = 150
SIZES = {  # products of weights are nearly all there is to count
    "hidden_size": 96,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "n_routed_experts": 8,
}


def _job(kinds, tokens, memory, axes, **changes):
    return Job(
        dataclasses.replace(architecture(kinds), **SIZES),
        tokens,
        dtype="float32",
        memory=MemorySection(**memory),
        parallel=ParallelSection(**axes),
        **changes,
    )


def _counted(job, folder, with_operations):
    """What one rank moves, receives, gathers and computes in a step."""
    use_native("portable" if with_operations else "auto")
    found = Counter()
    model = load_model(job.shape, torch.float32, seed=0)
    names = trained_names(model.groups(), train := _settings(job))
    freeze_all_but(model, names)
    mesh = make_mesh(data=job.parallel.data, context=job.parallel.context, expert=job.parallel.expert)
    parallelize(model, mesh, receive=10**6)
    save, load, gather = Spool.save, Spool.load, Shards.gather

    def saved(spool, at, value, dtype):
        found["written"] += value.nbytes
        return save(spool, at, value, dtype)

    def loaded(spool, at, shape, dtype):
        found["read"] += torch.Size(shape).numel() * dtype.itemsize
        return load(spool, at, shape, dtype)

    def gathered(shards):
        if shards._before is None:
            found["root" if shards is model.shards else "layers"] += 1
        gather(shards)

    memory = job.memory
    levers = Levers(
        tile=memory.tile,
        recompute=memory.recompute,
        keep_fronts=memory.keep_fronts,
        keep_every=memory.keep_every,
        offload=memory.offload,
        spool=str(folder) if memory.offload == "disk" else None,
    )
    packs = [random_pack(job.length, VOCABULARY) for _ in range(job.sequences_per_step)]
    optimizer = Optimizer(model, names, train, mesh=mesh)
    with (
        patch.object(Spool, "save", saved),
        patch.object(Spool, "load", loaded),
        patch.object(Shards, "gather", gathered),
        FlopCounterMode(display=False) if with_operations else nullcontext() as counter,
    ):
        take_step(model, packs, optimizer, train, step=1, levers=levers)
    found["operations"] = counter.get_total_flops() if with_operations else 0
    for axis in {
        id(axis): axis for axis in (mesh.world, mesh.context, mesh.expert, mesh.expert_replicas)
    }.values():
        found.update(axis.received)
    return dict(found)


def _settings(job):
    values = {"steps": 1, "lr": 1e-5, "sequences_per_step": job.sequences_per_step, "balance": job.balance}
    return TrainSection(**values, trainable=list(job.trainable))


def _of_ranks(job, folder=None, *, with_operations=False):
    return run_ranks(job.world, _counted, job, folder, with_operations, start="fork", timeout=120)


@pytest.mark.parametrize(
    ("context", "memory", "changes", "read", "written"),
    [
        # Layers 1 to 6, three of them DSA. Read: 6 forward, 6 of graphs, 3 for latents, 6 of dy; written: 6, 6 of dx.
        (1, {}, {}, 6 + 6 + 3 + 6, 6 + 6),
        # The inputs of layers 3 and 6 are kept; 0, 1, 3 and 4 run again, the first of them on the embedding.
        (1, {"keep_every": 3}, {}, 6 + 3 + 6 + 3 + 6, 6 + 4 + 6),
        (1, {}, {"trainable": ("head",)}, 6, 6),
        # The walk back ends at layer 1, which hands nothing down.
        (1, {}, {"trainable": ("mla",)}, 6 + 6 + 3 + 5, 6 + 5),
        # Each read forward is two, and half a stream of segments' ends, read with the tile before: so are those of the
        # 3 DSA layers back. Then x twice, dy, 7 middles, and the ends of dx, 6 x 1, written 6 x 1/2.
        (2, {}, {}, 6 * 3 + 6 * 2 + 3 * 2 + 6 + 7 + 6, 6 + 7 + 6 + 3),
        (2, {"keep_every": 3}, {}, 6 * 3 + 3 * 3 + 6 * 2 + 3 * 2 + 6 + 7 + 6, 6 + 4 + 7 + 6 + 3),
        (2, {"keep_fronts": True}, {}, 6 * 3 + 6 + 3 * 2 + 6 + 6, 6 + 6 + 3),
        (2, {}, {"trainable": ("head",)}, 6 * 3, 6),
        # One more pass forward counts the experts.
        (2, {}, {"balance": "aux"}, 2 * 6 * 3 + 6 * 2 + 3 * 2 + 6 + 7 + 6, 2 * 6 + 7 + 6 + 3),
    ],
)
def test_streams_are_read_and_written_as_often_as_planned(context, memory, changes, read, written, tmp_path):
    """By hand, by the medium and by the plan, in sizes of a layer input; beside it the mean, a quarter of one."""
    tokens = 128
    job = _job(
        "KDKDKDK",
        tokens,
        {"tile": 16, "offload": "disk", **memory},
        {"context": context},
        **changes,
    )
    stream = 4 * 96 * 4 * tokens // context
    for rank in _of_ranks(job, tmp_path):
        assert rank["read"] == (read + 1 / 4) * stream
        assert rank["written"] == (written + 1 / 4) * stream
    work = offload_work(Passes(job))
    assert work is not None
    assert work.amount == pytest.approx((read + written + 1 / 2) * stream)
    host = dataclasses.replace(job, memory=job.memory.model_copy(update={"offload": "host"}))
    there_or_back = offload_work(Passes(host))
    assert there_or_back is not None
    assert there_or_back.amount == pytest.approx((read + 1 / 4) * stream)


@pytest.mark.parametrize(
    ("memory", "axes"),
    [
        ({}, {"context": 2, "expert": 2}),
        ({"recompute": False}, {"context": 2, "expert": 2}),
        ({"keep_every": 2}, {"context": 2}),
        ({"keep_fronts": True}, {"context": 2}),
        ({}, {"data": 2, "expert": 2}),
        ({"recompute": False}, {"data": 2, "expert": 2}),
    ],
)
def test_a_step_exchanges_and_computes_what_is_planned(memory, axes):
    """Means over two ranks of a step: ends of segments, counts and single numbers are not planned."""
    job = _job("DKDKD", 1024, {"tile": 128, **memory}, axes, sequences_per_step=axes.get("data", 1))
    ranks = _of_ranks(job, with_operations=True)
    mean = {name: sum(rank.get(name, 0) for rank in ranks) / 2 for name in ranks[0]}
    planned = {work.name: work.amount for work in exchange_work(Passes(job))}
    latents = sum(mean.get(f"DSA {what}", 0) for what in ("latents", "pool keys", "latent gradients"))
    assert planned.get("DSA latents", 0) == pytest.approx(latents, rel=1e-9)
    tokens = sum(mean.get(f"expert {what}", 0) for what in ("tokens", "outputs", "gradients"))
    assert planned.get("MoE tokens", 0) == pytest.approx(tokens, rel=0.02)
    assert planned["gradients reduced"] == pytest.approx(mean["gradients"], rel=1e-3)
    computed = sum(work.amount for work in product_work(Passes(job)))
    assert computed == pytest.approx(mean["operations"], rel=0.006)


def test_segments_that_end_within_a_pool_send_whole_ones():
    """1,009 tokens, 253 pools of 4: measured are 127 of each rank; planned 4 segments as long as the longest, 256."""
    job = _job("D", 1009, {"tile": 128}, {"context": 2})
    assert job.shape.index_kpool == 4
    ranks = _of_ranks(job)
    (work,) = (each for each in exchange_work(Passes(job)) if each.name == "DSA latents")
    pool = (4 * 24 * 3 + job.shape.index_head_dim * 2) * 4
    for rank in ranks:
        assert sum(rank[f"DSA {what}"] for what in ("latents", "pool keys", "latent gradients")) == 127 * pool
    assert work.amount == 128 * pool
    assert work.amount == sum(latents_received(job).values())


def test_the_root_is_gathered_once_more_where_experts_are_counted_first():
    """Two ranks, half of each weight from the other one: 2 gatherings of root and layers, 3 with balance = "aux"."""
    received = {}
    for balance, times in (("none", 2), ("aux", 3)):
        job = _job("KD", 64, {"tile": 32}, {"data": 2}, sequences_per_step=2, balance=balance)
        for rank in _of_ranks(job):
            assert (rank["root"], rank["layers"]) == (times, 2 * times)
        half = sum(weight.num_bytes for weight in job.weights() if not weight.is_buffer) / 2
        (work,) = (each for each in exchange_work(Passes(job)) if each.name == "weights gathered")
        received[balance] = work.amount
        assert work.amount == times * half
    assert received["aux"] == 1.5 * received["none"]
