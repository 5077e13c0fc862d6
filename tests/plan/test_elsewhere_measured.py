"""What a plan puts into files and beside a device, against a real spool, a real block and a real optimizer."""

import dataclasses

import pytest
import torch
from planned import with_memory

from longstrand.bench._small_models import architecture
from longstrand.bench._steps import random_pack
from longstrand.config import MemorySection, ParallelSection, TrainSection
from longstrand.memory import Levers, store
from longstrand.model import load_model
from longstrand.model.parallelize import parallelize
from longstrand.parallel import make_mesh, run_ranks
from longstrand.plan.job import Job
from longstrand.plan.memory import plan_memory
from longstrand.plan.terms import total
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names


def _job(tokens, context=1, dtype="float32", **memory):
    return Job(
        architecture("KDKDK"),
        tokens,
        dtype=dtype,
        memory=MemorySection(**memory),
        parallel=ParallelSection(context=context),
    )


def _trained(job):
    model = load_model(job.shape, getattr(torch, job.dtype), seed=0)
    names = trained_names(model.groups(), TrainSection(steps=1, lr=1e-3))
    freeze_all_but(model, names)
    return model, names


def _spooled(job, folder):
    """Bytes of the spool's file while a rank goes forward and back."""
    model, _ = _trained(job)
    parallelize(model, make_mesh(data=1, context=job.parallel.context, expert=1))
    out = model.token_logprobs(
        random_pack(job.length, 19),
        levers=Levers(job.memory.tile, job.memory.keep_every, "disk", str(folder)),
    )
    found = [path.stat().st_size for path in folder.glob("*.spool")]
    out.sum().backward()
    assert found
    return found


@pytest.mark.parametrize(
    ("tokens", "context", "memory"),
    [
        (130, 1, {"tile": 32}),
        (130, 1, {"tile": 32, "keep_every": 2}),
        (1000, 2, {"tile": 48}),
        (1000, 2, {"tile": 48, "keep_every": 2}),
        (20, 1, {"tile": 4096}),
        (64, 2, {"tile": 4096}),
    ],
)
def test_a_spool_is_as_large_as_planned(tokens, context, memory, tmp_path):
    job = _job(tokens, context, offload="disk", **memory)
    for rank in run_ranks(context, _spooled, job, tmp_path, start="fork", timeout=100):
        assert set(rank) == {total(plan_memory(job).elsewhere, "file")}


class NoCopies:
    """Of a pass that reads and writes nothing."""

    def out(self, value, slot):
        raise AssertionError("nothing moves")

    def back(self, slot):
        raise AssertionError("nothing moves")

    def close(self):
        """Nothing is under way."""


def test_a_block_beside_the_device_is_as_large_as_planned(monkeypatch):
    """On a CPU that stands for a device, with nothing to move: the pass is opened and closed."""
    made = []
    block = store.host_block

    def counted(num_bytes):
        made.append(block(num_bytes))
        return made[-1]

    monkeypatch.setattr(store, "host_block", counted)
    monkeypatch.setattr(store, "CudaCopies", lambda block, device: NoCopies())
    monkeypatch.setattr(store, "require_other_memory", lambda setting, device: None)
    job = _job(130, tile=32, offload="host")
    model, _ = _trained(job)
    levers = Levers(job.memory.tile, offload="host")
    store.open_streams(levers, model.stream_demand(job.length, levers), model.norm.weight).close()
    assert [each.nbytes for each in made] == [total(plan_memory(job).elsewhere, "host")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_optimizer_beside_the_device_takes_what_is_planned(dtype, monkeypatch):
    """`cpu:0` is another device than `cpu` to torch, so that all that moves to a host is made."""
    job = _job(64, dtype=dtype)
    model, names = _trained(job)
    optimizer = Optimizer(
        model, names, TrainSection(steps=1, lr=1e-3), device=torch.device("cpu", 0), threads=1
    )
    model.token_logprobs(random_pack(64, 19), levers=Levers(32)).sum().backward()
    moved = {}
    step = optimizer._adamw.step

    def watched():
        moved.update({id(p): p.grad for group in optimizer._adamw.param_groups for p in group["params"]})
        step()

    monkeypatch.setattr(optimizer._adamw, "step", watched)
    optimizer.step(1e-3)
    states = optimizer._adamw.state.values()
    planned = {term.name: term.num_bytes for term in plan_memory(_host(job)).elsewhere}
    assert planned == {
        "moments": sum(state[name].nbytes for state in states for name in ("exp_avg", "exp_avg_sq")),
        "float32 copies": sum(copy.nbytes for copy in optimizer.copies.values()),
        "gradients on the host": sum(grad.nbytes for grad in moved.values()),
    }


def _host(job):
    return with_memory(dataclasses.replace(job, kind="gpu"), optimizer="host")


def test_evidence_says_where_something_was_counted():
    """A file is the same anywhere; tensors on a GPU have been counted on a CPU alone."""
    on_cpu = plan_memory(_job(130, tile=32, offload="disk"))
    on_gpu = plan_memory(dataclasses.replace(_job(130, tile=32, offload="disk"), kind="gpu"))
    beside = plan_memory(_host(_job(130)))
    assert {term.evidence.partition(":")[0] for term in on_cpu.device} == {"measured"}
    assert {term.evidence.partition(":")[0] for term in on_gpu.device} == {"counted", "estimated"}
    assert {term.evidence for term in (*on_cpu.elsewhere, *on_gpu.elsewhere)} == {
        "measured: the size of a spool (docs/planner.md)"
    }
    assert {term.evidence for term in beside.elsewhere} == {
        "counted: living tensors, on a CPU and not on a GPU (docs/planner.md)"
    }
