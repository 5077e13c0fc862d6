"""Bytes that a rank holds at the peak of each phase of a step."""

from __future__ import annotations

from longstrand.plan.job import Job
from longstrand.plan.terms import Memory, Term


def plan_memory(job: Job) -> Memory:
    """What one rank of a job holds: on its device by phase, on its host and in files for the whole step."""
    # A first sketch, until the walk over tiles is counted here.
    shape, e, w, n = job.shape, job.itemsize, job.wide, job.world
    tokens = -(-job.length // job.parallel.context)
    weights = sum(each.num_bytes for each in job.weights()) // n
    trained = sum(each.num_values for each in job.weights() if each.trains) // n
    host = job.memory.optimizer == "host"
    stream = shape.hc_mult * shape.hidden_size * e
    kept = -(-(shape.num_hidden_layers - 1) // job.memory.keep_every) + job.memory.keep_every - 1
    offload = job.memory.offload
    inputs = Term(
        "layer inputs",
        kept * stream * tokens,
        "device" if offload == "none" else "host" if offload == "host" else "file",
        f"{kept} streams",
    )
    moments = Term("moments", 2 * trained * w, "host" if host else "device", "two per trained parameter")
    static = [Term("weights", weights, "device", job.dtype)]
    if not host:
        static.append(moments)
    gradients = Term("gradients", trained * w, "device", "float32 or wider")
    working = Term("a tile in work", 40 * stream * min(job.memory.tile, tokens), "device", "transients")
    on_device = [inputs] if offload == "none" else []
    return Memory(
        {
            "start": tuple(static),
            "forward": (*static, *on_device, working),
            "backward": (*static, gradients, *on_device, working),
            "optimizer": (*static, gradients),
        },
        tuple(each for each in (moments, inputs) if each.place != "device"),
    )
