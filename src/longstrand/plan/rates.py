"""What part of a data sheet's rate each kind of work reaches: the planner's only assumptions about speed.

On a GPU NOTHING HERE WAS MEASURED: no step of this code on one has been timed. The ops run there in plain torch, so the
shares are guesses with a reason each, taken low where torch starts many small operations. `longstrand plan
--calibrate RUN...` replaces them by what runs on your device took. On a CPU they are measured: docs/planner.md says on
what machine and how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from longstrand.plan.devices import Device
from longstrand.plan.job import Job

Of = Literal["narrow", "float32", "memory", "link", "start", "gb"]


@dataclass(frozen=True)
class Share:
    """A part of a rate of a device.

    Attributes:
        part: of the rate; for starts seconds of one, for "gb" 10^9 bytes per second.
        of: "narrow": the products of the model's dtype; "float32": those in float32 whatever the dtype.
        evidence: as a term of a plan shows it.
    """

    part: float
    of: Of
    evidence: str


_WHAT = {
    "narrow": "of the data sheet's products",
    "float32": "of its products in float32",
    "memory": "of its memory",
    "link": "of the link",
}


def _guess(part: float, of: Of, why: str) -> Share:
    size = (
        f"{1e6 * part:g} us each"
        if of == "start"
        else f"{part:g} GB/s"
        if of == "gb"
        else f"{part:.0%} {_WHAT[of]}"
    )
    return Share(part, of, f"estimated: {size}, because {why}")


def _measured(part: float, of: Of, what: str) -> Share:
    return Share(part, of, f"measured: {what} (docs/planner.md)")


_LINKS = {
    "link": _guess(0.7, "link", "collectives of large messages reach that part of a link"),
    "host link": _guess(0.8, "link", "pinned copies of whole tiles"),
    "disk": _guess(
        1.5,
        "gb",
        "a small cloud machine's local disk was read at that rate by the ranks of a host together; none was measured "
        "beside a GPU",
    ),
    "host memory": _guess(25.0, "gb", "8 ranks share about 200 GB/s of a host's memory"),
}

GPU: Mapping[str, Share] = {
    "projections": _guess(
        0.5, "narrow", "torch's large products are published at 60 to 70 %, and tiles are short"
    ),
    "experts": _guess(0.25, "narrow", "one product per expert, of a few hundred rows"),
    "delta rule": _guess(0.05, "float32", "products of 16 x 128 in float32, chunk by chunk in plain torch"),
    "attention": _guess(0.1, "narrow", "products of a few gathered rows each, in plain torch"),
    "scores": _guess(0.4, "float32", "products of 256 rows and 4,096 pools per head in float32"),
    "streams": _guess(0.2, "float32", "4 streams into 24 coefficients: thin products in float32"),
    "head": _guess(0.4, "narrow", "blocks of the vocabulary"),
    "memory": _guess(
        0.5, "memory", "each operation of plain torch is a pass of its own, often over a few MB"
    ),
    "gathers": _guess(0.3, "memory", "rows of 1 KiB at random places"),
    "optimizer": _guess(0.7, "memory", "fused AdamW streams through memory"),
    "starts": _guess(6e-6, "start", "torch starts an operation in 5 to 10 us"),
    **_LINKS,
}

_CPU_LINKS = {
    **_LINKS,
    "disk": _measured(
        1.5,
        "gb",
        "1.5 GB/s read by direct I/O from the disk of a virtual machine, AMD EPYC; its ranks share it, and writes too",
    ),
}

_CORE = "one core of an AMD EPYC (Zen 5), float32, CPU kernels"
CPU_NATIVE: Mapping[str, Share] = {
    "projections": _measured(0.8, "narrow", _CORE),
    "experts": _measured(0.75, "narrow", _CORE),
    "delta rule": _measured(0.28, "float32", _CORE),
    "attention": _measured(0.45, "float32", _CORE),
    "scores": _measured(0.75, "float32", _CORE),
    "streams": _measured(0.5, "float32", _CORE),
    "head": _measured(0.6, "narrow", _CORE),
    "memory": _measured(0.42, "memory", _CORE),
    "gathers": _measured(1.0, "memory", _CORE),
    "optimizer": _measured(0.5, "memory", _CORE),
    "starts": _measured(15e-6, "start", _CORE),
    **_CPU_LINKS,
}

_HALF = "one core of an AMD EPYC (Zen 5), bfloat16, CPU kernels, a step of the toy and one of the wide model"
CPU_BFLOAT16: Mapping[str, Share] = {  # values are widened where they are used: bytes halve, time does not
    **CPU_NATIVE,
    "projections": _measured(0.5, "narrow", _HALF),
    "experts": _measured(0.5, "narrow", _HALF),
    "delta rule": _measured(0.2, "float32", _HALF),
    "attention": _measured(0.3, "float32", _HALF),
    "streams": _measured(0.35, "float32", _HALF),
    "memory": _measured(0.11, "memory", _HALF),
    "starts": _measured(20e-6, "start", _HALF),
}

_PLAIN = "one core of an AMD EPYC (Zen 5), float32, plain torch"
CPU_PORTABLE: Mapping[str, Share] = {
    **CPU_NATIVE,
    "delta rule": _measured(0.18, "float32", _PLAIN),
    "attention": _measured(0.27, "float32", _PLAIN),
    "scores": _measured(0.17, "float32", _PLAIN),
    "memory": _measured(0.17, "memory", _PLAIN),
    "gathers": _measured(0.5, "memory", _PLAIN),
    "starts": _measured(12e-6, "start", _PLAIN),
}


def share_of(kind: str, job: Job, device: Device) -> Share:
    """The part that a kind of work of a job reaches on a device."""
    if device.kind == "gpu":
        return GPU[kind]
    table = CPU_PORTABLE
    if job.form == "native" and job.dtype != "float64":  # which has no kernels, and runs in plain torch
        table = CPU_BFLOAT16 if job.dtype == "bfloat16" else CPU_NATIVE
    share = table[kind]
    if share.of == "gb" or job.dtype in share.evidence or share.evidence.startswith("estimated"):
        return share
    return replace(
        share,
        evidence="estimated: the part that float32 reaches, " + share.evidence.removeprefix("measured: "),
    )


def per_second(kind: str, job: Job, device: Device, span: int = 1) -> float:
    """Operations, bytes or starts per second of one rank; a CPU's threads share its work evenly.

    Args:
        span: ranks that an exchange joins: more than a host has go over the network.
    """
    share, here = share_of(kind, job, device), device.ranks_of_a_host(job.world)
    if share.of == "link":
        links = (device.peer_gb_per_second, device.network_gb_per_second)
        link = device.host_gb_per_second if kind == "host link" else links[span > here]
        return share.part * link * 1e9
    threads = job.threads if device.kind == "cpu" else 1
    if share.of == "gb":
        return share.part * 1e9 / (here if kind == "disk" else 1)
    if share.of == "start":
        return 1 / share.part
    if share.of == "memory":
        return share.part * device.memory_gb_per_second * 1e9 * threads
    narrow = share.of == "narrow" and job.dtype == "bfloat16"
    rate = (device.bfloat16_tflops if narrow else device.float32_tflops) * 1e12
    return share.part * rate * threads * (0.5 if job.dtype == "float64" else 1.0)
