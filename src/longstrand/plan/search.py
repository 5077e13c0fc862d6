"""The cheapest levers with which a job fits: switched on in order, kept only where nothing fits without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any

from longstrand.config import ParallelSection
from longstrand.plan.job import Job
from longstrand.plan.room import Room, memory_of, missing
from longstrand.plan.seconds import Seconds, plan_seconds
from longstrand.plan.streams import first_trained_layer, streams_at_once
from longstrand.plan.terms import Memory, Place

TILES = tuple(2**power for power in range(7, 16))
BASE_TILES = {"cpu": (1024,), "gpu": (4096, 2048, 8192, 16384)}
"""Of a plan without levers, the fastest; the first of equals. On a CPU that is 1,024 (docs/performance.md)."""


@dataclass(frozen=True)
class Step:
    """A lever that a plan switches on.

    Attributes:
        setting: as in a recipe, such as "memory.tile".
        over: bytes over each limit before it.
        bought: by how many bytes terms fell, by place and name, largest first.
        moved: bytes that it added in other places.
        seconds: what it adds to a step; less than 0: it is faster.
    """

    setting: str
    value: Any
    over: dict[Place, int]
    bought: tuple[tuple[str, int], ...]
    moved: dict[Place, int]
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A job with its levers chosen; where it does not fit, the closest.

    Attributes:
        missing: bytes over each limit; empty: it fits.
    """

    job: Job
    room: Room
    memory: Memory
    seconds: Seconds
    steps: tuple[Step, ...]
    missing: dict[Place, int]

    @property
    def fits(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class Lever:
    """One setting, and what it can be.

    Attributes:
        values: off first, then from cheapest to what saves most.
        tried: of the values, those from which the strongest is taken.
        put: the job with a value.
    """

    setting: str
    values: tuple[Any, ...]
    tried: tuple[Any, ...]
    put: Callable[[Job, Any], Job]

    def of(self, job: Job) -> Any:
        """Its value in a job."""
        section, name = self.setting.split(".")
        return getattr(getattr(job, section), name)

    def is_on(self, job: Job) -> bool:
        return bool(self.of(job) != self.values[0])


def search(job: Job, room: Room) -> Plan:
    """Levers and ranks for a job's model and length; what its own levers say is not read."""
    base = without_levers(job, room)
    levers = levers_for(base, room)
    best = reach(base, room, levers)
    if not missing(best, room):
        best = _only_needed(best, room, levers)
    return plan_of(best, room, base, levers)


def as_it_stands(job: Job, room: Room) -> Plan:
    """A job with the levers that it has; its steps say what each buys, whether it is needed or not."""
    base = replace(
        job,
        memory=job.memory.model_copy(update={"keep_every": 1, "offload": "none", "optimizer": "device"}),
    )
    levers = tuple(
        replace(lever, values=(lever.of(base), *lever.values[1:])) for lever in levers_for(base, room)
    )
    return plan_of(job, room, base, levers)


def plan_of(job: Job, room: Room, base: Job, levers: tuple[Lever, ...]) -> Plan:
    """A job with what its levers bought, one after the other."""
    steps, here = [], base
    for lever in levers:
        if lever.of(job) != lever.of(here):
            there = lever.put(here, lever.of(job))
            steps.append(_step(lever, here, there, room))
            here = there
    return Plan(job, room, memory_of(job), seconds_of(job, room), tuple(steps), missing(job, room))


def without_levers(job: Job, room: Room) -> Job:
    """The job on all devices with every lever off.

    Of the ranks as many as there are sequences per step compute sequences of their own, the others share them.
    Experts lie on all ranks of one host, or whole on each, as is faster; so the tile is chosen too.
    """
    off = {"recompute": True, "keep_fronts": False, "keep_every": 1, "offload": "none", "spool": None}
    data = gcd(room.num_devices, job.sequences_per_step)
    parallel = ParallelSection(data=data, context=room.num_devices // data)
    most = _power_up(-(-job.length // parallel.context))
    optimizer = "host" if room.optimizer == "host" else "device"
    memory = job.memory.model_copy(update={**off, "optimizer": optimizer})
    plain = replace(job, memory=memory, parallel=parallel)
    near = [size for size in _expert_sizes(plain) if size <= room.ranks_per_host]
    tiles = dict.fromkeys(min(tile, most) for tile in BASE_TILES[room.device.kind])
    spread = _fastest([_with_experts(plain, size) for size in sorted({near[0], near[-1]})], room)
    return _fastest([_memory_setter("tile")(spread, tile) for tile in tiles], room)


def _fastest(jobs: list[Job], room: Room) -> Job:
    """The first of equals."""
    return min(jobs, key=lambda job: seconds_of(job, room).total) if len(jobs) > 1 else jobs[0]


def levers_for(base: Job, room: Room) -> tuple[Lever, ...]:
    """Cheapest first; those that cannot act on this device are left out."""
    levers = [_tile(base), _keep_every(base)]
    offload = ("none", "disk") if room.is_cpu else ("none", "host", "disk")
    levers.append(Lever("memory.offload", offload, offload[1:], _memory_setter("offload")))
    if room.optimizer == "auto" and not room.is_cpu:
        levers.append(Lever("memory.optimizer", ("device", "host"), ("host",), _memory_setter("optimizer")))
    contexts = _context_sizes(base)
    levers.append(Lever("parallel.context", contexts, contexts[-1:], _with_context))
    near, sizes = base.parallel.expert, _expert_sizes(base)
    experts = (near, *(size for size in sizes if size > near))
    levers.append(Lever("parallel.expert", experts, experts[-1:], _with_experts))
    return tuple(levers)


def reach(job: Job, room: Room, levers: tuple[Lever, ...]) -> Job:
    """Switches levers on at their strongest until the job fits; the closest where it never does.

    Then once more with all of them on from the start: it may be that only another tile fits with them.
    """
    found = _strengthened(job, room, levers)
    if not missing(found, room):
        return found
    all_on = job
    for lever in levers:
        if lever.tried and lever.setting != "memory.tile":
            all_on = lever.put(all_on, lever.tried[-1])
    other = _strengthened(all_on, room, levers)
    return other if _over(other, room) < _over(found, room) else found


@lru_cache(maxsize=512)
def seconds_of(job: Job, room: Room) -> Seconds:
    """As `plan_seconds`, once per job; with the factors of a calibration where the room has one."""
    if room.fitted is None:
        return plan_seconds(job, room.device)
    return room.fitted.explained(plan_seconds(job, room.device, dict(room.fitted.factors)), job)


def _strengthened(job: Job, room: Room, levers: tuple[Lever, ...]) -> Job:
    """Lever by lever the value that leaves least over the limits, or the first that fits; again while that helps."""
    over, before = _over(job, room), None
    while over and job != before:
        before = job
        for lever in levers:
            for value in lever.tried if over else ():
                candidate = lever.put(job, value)
                if (now := _over(candidate, room)) < over:
                    job, over = candidate, now
                if not now:
                    break
    return job


def _over(job: Job, room: Room) -> int:
    return sum(missing(job, room).values())


def _only_needed(job: Job, room: Room, levers: tuple[Lever, ...]) -> Job:
    """Each lever at its cheapest value with which the job fits, the most costly lever first.

    Repeated until nothing changes, so that without any of them the job does not fit.
    """

    def cost(lever: Lever) -> float:
        return seconds_of(job, room).total - seconds_of(lever.put(job, lever.values[0]), room).total

    while True:
        before = job
        on = [lever for lever in levers if lever.is_on(job)]
        for lever in sorted(reversed(on), key=cost, reverse=True):
            weaker = lever.values[: lever.values.index(lever.of(job))]
            fitting = (put for value in weaker if not missing(put := lever.put(job, value), room))
            job = next(fitting, job)
        if job == before:
            return job


def _step(lever: Lever, here: Job, there: Job, room: Room) -> Step:
    before, after = _by_name(memory_of(here)), _by_name(memory_of(there))
    fell = {name: before[name] - after.get(name, 0) for name in before}
    bought = sorted(((n, b) for n, b in fell.items() if b > 0), key=lambda each: -each[1])
    places: tuple[Place, ...] = ("device", "host", "file")
    grown = {place: memory_of(there).bytes_of(place) - memory_of(here).bytes_of(place) for place in places}
    return Step(
        lever.setting,
        lever.of(there),
        missing(here, room),
        tuple(bought),
        {place: num_bytes for place, num_bytes in grown.items() if num_bytes > 0},
        seconds_of(there, room).total - seconds_of(here, room).total,
    )


def _by_name(memory: Memory) -> dict[str, int]:
    """Of a rank: device terms at the step's peak."""
    named: dict[str, int] = {}
    for term in memory.device:
        named[term.name] = named.get(term.name, 0) + term.num_bytes
    return named


def _tile(base: Job) -> Lever:
    """Off, then by distance from it: large tiles have large transients, small ones many carries."""
    off, most = base.memory.tile, _power_up(-(-base.length // base.parallel.context))
    others = sorted(
        (size for size in TILES if size != off and size <= most),
        key=lambda size: (max(size / off, off / size), size),
    )
    return Lever("memory.tile", (off, *others), tuple(others), _memory_setter("tile"))


def _keep_every(base: Job) -> Lever:
    """Every k that keeps fewer streams at once than each smaller one does."""
    layers, first = base.shape.num_hidden_layers, first_trained_layer(base)
    values, least = [1], streams_at_once(layers, first, 1)
    for k in range(2, layers - first + 1):
        if (streams := streams_at_once(layers, first, k)) < least:
            values.append(k)
            least = streams
    return Lever("memory.keep_every", tuple(values), tuple(values[1:][-1:]), _memory_setter("keep_every"))


def _memory_setter(name: str) -> Callable[[Job, Any], Job]:
    def put(job: Job, value: Any) -> Job:
        return replace(job, memory=job.memory.model_copy(update={name: value}))

    return put


def _with_context(job: Job, context: int) -> Job:
    data = job.world // context
    return replace(job, parallel=job.parallel.model_copy(update={"data": data, "context": context}))


def _with_experts(job: Job, experts: int) -> Job:
    return replace(job, parallel=job.parallel.model_copy(update={"expert": experts}))


def _context_sizes(base: Job) -> tuple[int, ...]:
    world, first = base.world, base.parallel.context
    sizes = (size for size in range(first, world + 1) if world % size == 0)
    return tuple(size for size in sizes if 2 * size <= base.length or size == first)


def _expert_sizes(job: Job) -> list[int]:
    if "sparse" not in job.shape.mlp_layer_types:
        return [1]
    both = gcd(job.world, job.shape.n_routed_experts)
    return [size for size in range(1, both + 1) if both % size == 0]


def _power_up(tokens: int) -> int:
    return 1 << max(0, tokens - 1).bit_length()
