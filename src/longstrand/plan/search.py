"""The levers with which a job fits in the fewest seconds, none of them on that it fits without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, inf
from typing import Any

from longstrand.config import MemorySection, ParallelSection
from longstrand.plan.job import Job
from longstrand.plan.keep_every import values_of_keep_every
from longstrand.plan.room import Room, memory_of, missing, needed
from longstrand.plan.seconds import Seconds, plan_seconds
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
        chosen: whether a search chose the levers; else the job came with them.
    """

    job: Job
    room: Room
    memory: Memory
    seconds: Seconds
    steps: tuple[Step, ...]
    missing: dict[Place, int]
    chosen: bool = False

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
    """Levers and ranks for a job's model and length; what its own levers say is not read.

    Ranks are as few as fits; with them, the other levers are those with the fewest seconds.
    """
    base = without_levers(job, room)
    levers = levers_for(base, room)
    best = reach(base, room, levers)
    if not missing(best, room) and best != base:
        best = _cheapest_on_fewest_ranks(best, base, room, levers)
    return replace(plan_of(best, room, base, levers), chosen=not missing(best, room))


def _cheapest_on_fewest_ranks(found: Job, base: Job, room: Room, levers: tuple[Lever, ...]) -> Job:
    """From a job that fits."""
    best = found if found.parallel == base.parallel else _only_needed(found, room, levers)
    while True:
        chosen = cheapest(best, base, room, levers)
        best = _only_needed(chosen, room, levers)
        if best.parallel == chosen.parallel:
            return best


def cheapest(found: Job, base: Job, room: Room, levers: tuple[Lever, ...]) -> Job:
    """The fastest job that fits on the ranks of one that does, and with none of its levers off.

    All values of its levers are combined, of a tile that of `found` and that of `base`. Of equals it has the fewest
    levers, then takes least of a host and its disk. Recomputing and moving take time, so that seconds with neither
    bound those with them: what cannot be faster than the best so far is not planned.
    """
    own = [lever for lever in levers if lever.setting.startswith("memory.")]
    choices = {lever.setting: lever.values for lever in own}
    tiles, every = dict.fromkeys((base.memory.tile, found.memory.tile)), choices["memory.keep_every"]
    optimizers = choices.get("memory.optimizer", (base.memory.optimizer,))
    best, least = found, (inf, 0, 0)
    for tile, optimizer in product(tiles, optimizers):
        plain = _with_memory(found, tile=tile, optimizer=optimizer, keep_every=1, offload="none")
        fastest = seconds_of(plain, room).total
        offloads = [each for each in choices["memory.offload"] if _may_hold(plain, room, every, each)]
        for keep_every, offload in product(every, offloads):
            if fastest > least[0] or (fastest == least[0] and keep_every > 1):
                break
            job = _with_memory(plain, keep_every=keep_every, offload=offload)
            fits = not missing(job, room) and _needs_all(job, room, own)
            if fits and (rank := _rank(job, room, own)) < least:
                best, least = job, rank
    return best


def _may_hold(plain: Job, room: Room, every: Sequence[int], offload: str) -> bool:
    """Whether a device has room for any k: for the one with the fewest streams, or for all inputs kept."""
    ends = (_with_memory(plain, keep_every=k, offload=offload) for k in (every[-1], 1))
    return any("device" not in missing(job, room) for job in ends)


def _needs_all(job: Job, room: Room, levers: Sequence[Lever]) -> bool:
    return all(missing(lever.put(job, lever.values[0]), room) for lever in levers if lever.is_on(job))


def _rank(job: Job, room: Room, levers: Sequence[Lever]) -> tuple[float, int, int]:
    """The less, the better: seconds, levers, and bytes of a host and its disk."""
    elsewhere = needed(job, room, "host") + needed(job, room, "file")
    return seconds_of(job, room).total, sum(lever.is_on(job) for lever in levers), elsewhere


def as_it_stands(job: Job, room: Room) -> Plan:
    """A job with the levers that it has; its steps say what each buys, whether it is needed or not."""
    base = _with_memory(job, keep_every=1, offload="none", optimizer="device")
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


@lru_cache(maxsize=64)
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

    Then once more with all of them on from the start: it may be that only another tile fits with them. Where a host or
    its disk has a limit, what one lever puts there leaves no room for what another would: so from each place that
    inputs and the optimizer can be in, too.
    """
    found = _strengthened(job, room, levers)
    if not missing(found, room):
        return found
    for start in _starts(job, room, levers):
        other = _strengthened(start, room, levers)
        if _over(other, room) < _over(found, room):
            found = other
        if not missing(found, room):
            break
    return found


def _starts(job: Job, room: Room, levers: tuple[Lever, ...]) -> Iterator[Job]:
    all_on = job
    for lever in levers:
        if lever.tried and lever.setting != "memory.tile":
            all_on = lever.put(all_on, lever.tried[-1])
    yield all_on
    if room.limit("host") is None and room.limit("file") is None:
        return
    moving = [lever for lever in levers if lever.setting in ("memory.offload", "memory.optimizer")]
    for values in product(*(lever.values for lever in moving)):
        moved = job
        for lever, value in zip(moving, values, strict=True):
            moved = lever.put(moved, value)
        if moved != job:
            yield moved


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
    """Each lever at its first value with which the job fits and is no slower, the most costly lever first.

    Off, and with fewer ranks, it may be slower. Repeated until nothing changes, so that without any of them the job
    does not fit.
    """

    def seconds(of: Job) -> float:
        return seconds_of(of, room).total

    def weaker(lever: Lever) -> Iterator[Job]:
        for value in lever.values[: lever.values.index(lever.of(job))]:
            candidate, may_slow = (
                lever.put(job, value),
                value == lever.values[0] or "parallel" in lever.setting,
            )
            if not missing(candidate, room) and (may_slow or seconds(candidate) <= seconds(job)):
                yield candidate

    while True:
        before = job
        on = [lever for lever in levers if lever.is_on(job)]
        off = {lever.setting: seconds(lever.put(job, lever.values[0])) for lever in on if len(on) > 1}
        for lever in sorted(reversed(on), key=lambda lever: off.get(lever.setting, 0.0)):
            job = next(weaker(lever), job)
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
    """Every k for which no other keeps as few streams at once and computes no more of any kind of layer again.

    So too every k that keeps fewer streams than each smaller one does, of which the last is the strongest.
    """
    values = values_of_keep_every(replace(base, length=2, memory=MemorySection(), parallel=ParallelSection()))
    return Lever("memory.keep_every", values, values[1:][-1:], _memory_setter("keep_every"))


def _memory_setter(name: str) -> Callable[[Job, Any], Job]:
    return lambda job, value: _with_memory(job, **{name: value})


def _with_memory(job: Job, **changes: Any) -> Job:
    return replace(job, memory=job.memory.model_copy(update=changes))


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
