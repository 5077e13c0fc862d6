"""A plan as plain values and sentences: for JSON, tables, and the comments of a written recipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import ValidationError

from longstrand.config import MemorySection
from longstrand.errors import UserError
from longstrand.plan.devices import GIB
from longstrand.plan.job import Job, cores_here
from longstrand.plan.room import Room, file_terms, host_terms, memory_of, missing, needed
from longstrand.plan.rows import rows_of
from longstrand.plan.rules import require_possible
from longstrand.plan.search import Plan, Step, seconds_of
from longstrand.plan.terms import Place, Term, total
from longstrand.wording import size_bytes

NOT_ON_A_GPU = (
    "Not measured on a GPU: no run of this code on one has been made. Tensors are counted as a CPU run allocates them; "
    "what CUDA, NCCL and torch's allocator take beside them, and every rate behind the seconds, are estimates."
)

PLACES: dict[Place, str] = {"device": "a device", "host": "a host", "file": "a host's disk"}

WORTH = 0.03
"""Of the tokens per second: less is not worth a line."""

COSTS = {
    "memory.tile": "launches and carries of smaller tiles",
    "memory.keep_every": "one more forward pass of the layers between",
    "memory.offload": "copies beside the computation",
    "memory.optimizer": "gradients to the host and parameters back, and a step on its CPU",
    "parallel.context": "more exchanges of carries and latents",
    "parallel.expert": "exchanges of tokens between more ranks",
}


def place_of(room: Room, place: Place) -> str:
    """In words, and by which limit where there is another than the disk's."""
    if place == "file" and room.has_bound_spools and room.spool_bytes is not None:
        return f"{PLACES[place]}, where ulimit -f allows each rank's spool {size_bytes(room.spool_bytes)}"
    return PLACES[place]


def threads_of(plan: Plan) -> str:
    """CPU threads that the seconds are planned with, as words behind the devices; none on a GPU."""
    number = plan.job.threads
    return f", {number} CPU thread{'s' * (number > 1)} each" if plan.room.is_cpu else ""


def gib(num_bytes: float) -> str:
    """GiB (2^30 bytes) with three digits or more."""
    if not num_bytes:
        return "0"
    value = num_bytes / GIB
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.2f}" if abs(value) >= 1 else f"{value:.3f}"


def reason(step: Step) -> str:
    """Why a lever is on: what was exceeded without it."""
    if not step.over:
        return "asked for; it fits without"
    over = (f"{gib(num_bytes)} GiB too many on {PLACES[place]}" for place, num_bytes in step.over.items())
    return ", ".join(over) + " before it"


def effect(step: Step) -> str:
    """What a lever bought and moved: the two terms that fell most, and the places that grew."""
    fell = [f"{name} -{gib(num_bytes)}" for name, num_bytes in step.bought[:2]]
    grown = [f"{place} +{gib(num_bytes)}" for place, num_bytes in step.moved.items()]
    return f"GiB per rank: {', '.join(fell + grown)}" if fell or grown else "nothing"


def setting(step: Step) -> str:
    """As a line of TOML under its section's name."""
    return f"{step.setting} = {step.value!r}".replace("'", '"')


def what_is_missing(plan: Plan) -> str:
    """By how much a plan does not fit, and its largest terms there; one line."""
    parts = []
    for place, num_bytes in plan.missing.items():
        largest = sorted(terms_in(plan, place), key=lambda term: -term.num_bytes)[:3]
        named = ", ".join(f"{term.name} {gib(term.num_bytes)}" for term in largest)
        limit = plan.room.limit(place) or 0
        where, needs = place_of(plan.room, place), gib(needed(plan.job, plan.room, place))
        short = f"{gib(num_bytes)} GiB" if num_bytes >= GIB // 10 else size_bytes(num_bytes)
        parts.append(f"{short} are missing on {where} ({needs} of {gib(limit)} GiB; largest: {named})")
    return "; ".join(parts)


def terms_in(plan: Plan, place: Place) -> tuple[Term, ...]:
    """Of a rank's device, or of all ranks of one host."""
    if place == "device":
        return plan.memory.device
    return (host_terms if place == "host" else file_terms)(plan.memory, plan.room)


@dataclass(frozen=True)
class Faster:
    """A setting that no lever is, with which a plan fits too, in less time.

    Attributes:
        setting: as a line of TOML.
        gain: of the tokens per second, relative.
        device_bytes: what it then holds of a device.
    """

    setting: str
    gain: float
    device_bytes: int


def faster_with(plan: Plan) -> list[Faster]:
    """What spends the room that a plan leaves: graphs kept and not computed again, first halves kept between passes."""
    found = list[Faster]()
    settings = {"recompute": False} | ({"keep_fronts": True} if plan.job.parallel.context > 1 else {})
    for name, value in settings.items() if plan.fits else ():
        job = _possible(plan.job, {name: value})
        if job is None or job == plan.job or missing(job, plan.room):
            continue
        gain = plan.seconds.total / seconds_of(job, plan.room).total - 1
        if gain > WORTH:
            line = f"memory.{name} = {str(value).lower()}"
            found.append(Faster(line, gain, memory_of(job).device_bytes))
    return found


def _possible(job: Job, changes: dict[str, bool]) -> Job | None:
    """The job with other settings of its memory; None where a recipe could not say them."""
    try:
        changed = replace(job, memory=MemorySection.model_validate(job.memory.model_dump() | changes))
        require_possible(changed)
    except (UserError, ValidationError):
        return None
    return changed


def cores_short(plan: Plan) -> str | None:
    """Where the ranks of this machine have more threads than it has cores, which no rate knows; else None."""
    threads, cores = plan.room.ranks_per_host * plan.job.threads, cores_here()
    if not plan.room.device.is_this_cpu or plan.room.num_hosts > 1 or threads <= cores:
        return None
    return (
        f"The seconds take {threads} cores, one for each thread, and this machine has {cores}: here a step takes about "
        f"{threads / cores:.1f} times as long."
    )


def loading_bytes(plan: Plan) -> int:
    """At most of host memory on each host before the first step, where ranks fill the model layer by layer.

    A rank holds its part; beside it the embedding and the largest layer, or at the end what is no layer's: whole, and
    once more its own rows of that and its own experts. One process keeps all that it makes.
    """
    job = plan.job
    if job.world == 1:
        return 0
    whole: dict[int | None, int] = defaultdict(int)
    for weight in job.weights():
        whole[weight.layer] += weight.num_bytes
    embedding = job.shape.vocab_size * job.shape.hidden_size * job.itemsize
    rows = 1 / job.world
    experts = 1 / job.parallel.expert if job.parallel.expert > 1 else 0
    largest = max(whole[index] for index in range(job.shape.num_hidden_layers))
    beside = max(embedding + largest * (1 + rows + experts), whole[None] * (1 + rows))
    return plan.room.ranks_per_host * (rows_of(job).own_bytes + round(beside))


def as_dict(plan: Plan, *, alone: bool = True) -> dict[str, Any]:
    """Everything a plan says, in bytes and seconds.

    Args:
        alone: whether it is all that was asked, and no row of many: then with what would use the room that it leaves.
    """
    job, room = plan.job, plan.room
    faster = {"faster_with": [asdict(each) for each in faster_with(plan)]} if alone else {}
    return {
        "fits": plan.fits,
        "missing_bytes": dict(plan.missing),
        "length": job.length,
        "sequences_per_step": job.sequences_per_step,
        "dtype": job.dtype,
        "device": room.device.name,
        "devices": room.num_devices,
        "hosts": room.num_hosts,
        "ranks_per_host": room.ranks_per_host,
        "threads_per_rank": job.threads if room.is_cpu else None,
        "limits_bytes": _limits(room),
        "memory": job.memory.model_dump(exclude_none=True),
        "parallel": job.parallel.model_dump(exclude_none=True),
        "device_bytes": plan.memory.device_bytes,
        "peak_phase": plan.memory.peak_phase,
        "phases": {name: _dicts(terms) for name, terms in plan.memory.phases.items()},
        "host": {"bytes": total(terms_in(plan, "host")), "terms": _dicts(terms_in(plan, "host"))},
        "files": {"bytes": total(terms_in(plan, "file")), "terms": _dicts(terms_in(plan, "file"))},
        "loading_bytes_per_host": loading_bytes(plan),
        "cores_short": cores_short(plan),
        **faster,
        "seconds": {
            "total": plan.seconds.total,
            "tokens_per_second": plan.seconds.tokens_per_second(job),
            "terms": [
                {"name": t.name, "seconds": t.seconds, "why": t.why, "evidence": t.evidence}
                for t in plan.seconds.terms
            ],
        },
        "levers": [_step_dict(step) for step in plan.steps],
        "not_measured": [] if room.is_cpu else [NOT_ON_A_GPU],
    }


def _limits(room: Room) -> dict[str, int | None]:
    places: tuple[Place, ...] = ("device", "host", "file")
    return {place: room.limit(place) for place in places}


def _dicts(terms: Iterable[Term]) -> list[dict[str, Any]]:
    return [{"name": t.name, "bytes": t.num_bytes, "why": t.why, "evidence": t.evidence} for t in terms]


def _step_dict(step: Step) -> dict[str, Any]:
    return {
        "setting": step.setting,
        "value": step.value,
        "why": reason(step),
        "over_bytes": dict(step.over),
        "bought_bytes": dict(step.bought),
        "moved_bytes": dict(step.moved),
        "seconds": step.seconds,
        "costs": COSTS[step.setting],
    }
