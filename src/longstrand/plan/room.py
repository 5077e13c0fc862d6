"""What a plan may use, and by how many bytes a job exceeds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from longstrand.config import MemorySection, ParallelSection
from longstrand.plan.calibrated import Calibrated
from longstrand.plan.devices import GIB, Device
from longstrand.plan.job import Job
from longstrand.plan.memory import plan_memory
from longstrand.plan.terms import Memory, Place, Term, evidence_of, total
from longstrand.plan.walk import COPIES, INPUTS, MEAN, MOMENTS

PROCESS_BYTES = {"cpu": 208 * 2**20, "gpu": 3 * GIB}
"""Host memory of one process before it holds a tensor: Python, torch, and on a GPU CUDA's and NCCL's."""

_PROCESS_EVIDENCE = {
    "cpu": "measured: a run's log, after imports (docs/planner.md)",
    "gpu": "estimated: a CUDA context and NCCL; not measured here",
}


@dataclass(frozen=True)
class Room:
    """Devices and the memory around them.

    Attributes:
        num_devices: one rank each.
        host_bytes: memory of one host; None: not known, and not judged.
        file_bytes: free disk space of one host for spools; None: not known, and not judged.
        spool_bytes: that one file may have (ulimit -f), of which a rank has one; None: no limit.
        optimizer: where it may be; auto: on the host where the device has no room.
        fitted: factors of terms of seconds, from finished runs; None: estimates.
    """

    device: Device
    num_devices: int
    host_bytes: int | None = None
    file_bytes: int | None = None
    spool_bytes: int | None = None
    optimizer: Literal["auto", "device", "host"] = "auto"
    fitted: Calibrated | None = None

    @property
    def is_cpu(self) -> bool:
        return self.device.kind == "cpu"

    @property
    def ranks_per_host(self) -> int:
        """As the device says of so many."""
        return self.device.ranks_of_a_host(self.num_devices)

    @property
    def num_hosts(self) -> int:
        return -(-self.num_devices // self.ranks_per_host)

    @property
    def rank_bytes(self) -> int | None:
        """What the tensors of a rank may take of its device; None: not known."""
        if self.device.memory_bytes:
            return self.device.memory_bytes
        if self.host_bytes is None:
            return None
        return max(0, self.host_bytes // self.ranks_per_host - PROCESS_BYTES["cpu"])

    def limit(self, place: Place) -> int | None:
        """Bytes: of the device of a rank, or of a host's memory or disk for all its ranks."""
        if place == "device":
            return self.rank_bytes
        return self.host_bytes if place == "host" else self._files_bytes

    @property
    def has_bound_spools(self) -> bool:
        """Whether it is not the disk that ends what a host has in files, but how large each may be."""
        return self.spool_bytes is not None and self._files_bytes != self.file_bytes

    @property
    def _files_bytes(self) -> int | None:
        """Of all ranks of a host."""
        bound = None if self.spool_bytes is None else self.spool_bytes * self.ranks_per_host
        return min((limit for limit in (self.file_bytes, bound) if limit is not None), default=None)


@lru_cache(maxsize=4096)
def memory_of(job: Job) -> Memory:
    """As `plan_memory`, once per job; one walk serves streams on a host or in files, wherever the optimizer is."""
    if job.memory.offload == "disk":
        return _in_files(memory_of(_with(job, offload="host")), job)
    if job.memory.optimizer == "host":
        return _beside_optimizer(memory_of(_with(job, optimizer="device")), _optimizer_terms(job))
    return plan_memory(job)


def _with(job: Job, **changes: str) -> Job:
    return replace(job, memory=job.memory.model_copy(update=changes))


def _in_files(memory: Memory, job: Job) -> Memory:
    """Streams in files instead of in a host's memory: as many slots, of the same size."""
    evidence = evidence_of(job.kind, "file")
    elsewhere = tuple(
        replace(term, place="file", evidence=evidence) if term.name in (INPUTS, MEAN) else term
        for term in memory.elsewhere
    )
    return Memory(memory.phases, elsewhere)


def _beside_optimizer(memory: Memory, terms: tuple[Term, ...]) -> Memory:
    """With AdamW's state on the host; on the device it was as large all along, so that each peak stays where it was."""
    phases = {
        phase: tuple(term for term in held if term.name not in (MOMENTS, COPIES))
        for phase, held in memory.phases.items()
    }
    return Memory(phases, terms + memory.elsewhere)


def _optimizer_terms(job: Job) -> tuple[Term, ...]:
    """On the host; they depend on the ranks and what is trained, so that a single pool of tokens has the same."""
    ranks, pool = ParallelSection(data=job.world, expert=job.parallel.expert), max(2, job.shape.index_kpool)
    least = replace(job, length=pool, sequences_per_step=1, parallel=ranks, data_skew=1.0, threads=1)
    return plan_memory(replace(least, memory=MemorySection(optimizer="host"))).elsewhere


def host_terms(memory: Memory, room: Room) -> tuple[Term, ...]:
    """What all ranks of one host take of its memory; a CPU's tensors are among them."""
    ranks = room.ranks_per_host
    own = list(memory.elsewhere) if not room.is_cpu else [*memory.device, *memory.elsewhere]
    terms = [
        Term(term.name, term.num_bytes * ranks, "host", f"{ranks} x {term.why}", term.evidence)
        for term in own
        if term.place == "host" or (room.is_cpu and term.place == "device")
    ]
    kind = room.device.kind
    why = f"{ranks} x Python and its libraries"
    return (*terms, Term("processes", PROCESS_BYTES[kind] * ranks, "host", why, _PROCESS_EVIDENCE[kind]))


def file_terms(memory: Memory, room: Room) -> tuple[Term, ...]:
    """What all ranks of one host keep in files during a step."""
    ranks = room.ranks_per_host
    return tuple(
        Term(term.name, term.num_bytes * ranks, "file", f"{ranks} x {term.why}", term.evidence)
        for term in memory.elsewhere
        if term.place == "file"
    )


def needed(job: Job, room: Room, place: Place) -> int:
    """Bytes in a place, as `Room.limit` counts them."""
    memory = memory_of(job)
    if place == "device":
        return memory.device_bytes
    return total(host_terms(memory, room) if place == "host" else file_terms(memory, room))


def missing(job: Job, room: Room) -> dict[Place, int]:
    """Bytes over each limit that is exceeded; empty: the job fits."""
    return {place: -left for place, left in _left(job, room).items() if left < 0}


def not_judged(job: Job, room: Room) -> dict[Place, int]:
    """Bytes of a host that are needed where no limit is known."""
    places: tuple[Place, ...] = ("host", "file")
    unknown = [
        place for place in places if room.limit(place) is None and not (room.is_cpu and place == "host")
    ]
    return {place: num_bytes for place in unknown if (num_bytes := needed(job, room, place))}


def room_left(job: Job, room: Room) -> int:
    """Bytes to the nearest limit of what is used; less than 0: to the one that is exceeded most."""
    left = _left(job, room)
    return min((num_bytes for place, num_bytes in left.items() if needed(job, room, place)), default=0)


def _left(job: Job, room: Room) -> dict[Place, int]:
    places: tuple[Place, ...] = ("device", "file") if room.is_cpu else ("device", "host", "file")
    return {
        place: limit - needed(job, room, place)
        for place in places
        if (limit := room.limit(place)) is not None
    }
