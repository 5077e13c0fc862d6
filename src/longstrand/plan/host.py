"""A host before a run: its memory, pinned memory, files and open-file limit against what its ranks will take."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from longstrand.errors import UserError
from longstrand.plan.job import Job
from longstrand.plan.room import PROCESS_BYTES, Room, file_terms, host_terms, memory_of
from longstrand.plan.sizes import Sizes
from longstrand.plan.terms import Term, total
from longstrand.plan.walk import INPUTS, MEAN
from longstrand.wording import size_bytes

_CGROUPS = Path("/sys/fs/cgroup")

FIXED_DESCRIPTORS = 48
"""Of one process, before its sockets and sources: log, metrics, lock, spool, and each group's pipes and events.

An upper bound: 9 in all were counted in one process, 24 to 50 in each of two to four (toy, disk offload, all axes)."""


MAPPED_BYTES = {"cpu": 800 * 2**20, "gpu": PROCESS_BYTES["gpu"]}
"""Address space of one process before it holds a tensor.

On a CPU measured: VmPeak is 584 to 624 MiB of `import torch`, 699 MiB of `train --dry-run`, 855 MiB of a run of the
toy with 54 MiB of tensors (2,048 tokens, torch 2.13, less the TiB that an allocator reserves where it may). On a GPU at
least what it holds; CUDA maps far more.
"""


@dataclass(frozen=True)
class Machine:
    """What a host allows.

    Attributes:
        memory_bytes: of the host, or its cgroup where that allows less.
        memory_rule: where that number is from.
        swap_bytes: beside it.
        open_files: per process; None: no limit.
        locked_bytes: that a process may pin; None: no limit.
        address_bytes: of all that a process maps; None: no limit.
        file_bytes: of one file that a process writes; None: no limit.
    """

    memory_bytes: int
    memory_rule: str
    swap_bytes: int = 0
    open_files: int | None = None
    locked_bytes: int | None = None
    address_bytes: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True)
class Pinned:
    """Host memory that one rank pins for streams.

    Attributes:
        exact: one block of the bytes of its slots, as `memory/host.py` pins it.
        rounded: what an allocator takes that rounds a block per stream, of as many bytes, up to a power of two.
        num_streams: blocks of that allocator beside that of the mean.
    """

    exact: int
    rounded: int
    num_streams: int


@dataclass(frozen=True)
class HostNeeds:
    """What the ranks of one host take of it.

    Attributes:
        memory: terms in its memory, for all ranks.
        files: terms on the spool's disk, for all ranks.
        checkpoint_bytes: all parameters and moments, of the whole run, once.
        pinned: of one rank; None: nothing is pinned.
        descriptors: of one process.
        world: ranks of the run.
        kind: of the devices.
    """

    ranks: int
    memory: tuple[Term, ...]
    files: tuple[Term, ...]
    checkpoint_bytes: int
    pinned: Pinned | None
    descriptors: int
    world: int = 1
    kind: Literal["cpu", "gpu"] = "cpu"

    @property
    def mapped_bytes(self) -> int:
        """Address space of one process: libraries, of which it holds a part, and all its tensors."""
        return total(self.memory) // self.ranks - PROCESS_BYTES[self.kind] + MAPPED_BYTES[self.kind]

    @property
    def largest_file(self) -> tuple[str, int]:
        """What a rank writes into one file: its spool, or its part of a checkpoint, of which one is as large."""
        spool, part = total(self.files) // self.ranks, self.checkpoint_bytes // self.world
        return ("its spool", spool) if spool > part else ("its part of a checkpoint", part)


def this_machine() -> Machine:
    """The limits of this process and its host."""
    memory_bytes, memory_rule, swap_bytes = _memory_limit()
    return Machine(
        memory_bytes=memory_bytes,
        memory_rule=memory_rule,
        swap_bytes=swap_bytes,
        open_files=_soft(resource.RLIMIT_NOFILE),
        locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
        address_bytes=_soft(resource.RLIMIT_AS),
        file_bytes=_soft(resource.RLIMIT_FSIZE),
    )


def free_bytes(folder: Path) -> int | None:
    """Free space where a folder is or will be made; None: a file system without blocks."""
    disk = os.statvfs(existing(folder))
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else None


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def host_needs(job: Job, room: Room, num_sources: int = 1) -> HostNeeds:
    """What the ranks of one host take.

    Args:
        num_sources: files that the data comes from; each stays mapped, with a descriptor.
    """
    memory = memory_of(job)
    return HostNeeds(
        room.ranks_per_host,
        host_terms(memory, room),
        file_terms(memory, room),
        checkpoint_bytes(job),
        pinned_by(job),
        descriptors_of(job, num_sources),
        job.world,
        room.device.kind,
    )


def checkpoint_bytes(job: Job) -> int:
    """Of one checkpoint of the whole run: weights, AdamW's two moments, and float32 masters of what is narrower."""
    num_bytes = 0
    for weight in job.weights():
        master = job.wide if weight.trains and weight.itemsize < 4 else 0
        num_bytes += weight.num_values * (weight.itemsize + weight.trains * 2 * job.wide + master)
    return num_bytes


def pinned_by(job: Job) -> Pinned | None:
    """Host memory of `offload = "host"`: exactly, and as blocks of powers of two would take it."""
    if job.memory.offload != "host":
        return None
    slots = {term.name: term.num_bytes for term in memory_of(job).elsewhere if term.place == "host"}
    inputs, mean = slots[INPUTS], slots[MEAN]
    streams = Sizes(job).num_streams
    rounded = streams * power_of_two(-(-inputs // streams)) + power_of_two(mean)
    return Pinned(inputs + mean, rounded, streams)


def power_of_two(num_bytes: int) -> int:
    """The bytes that the framework's allocator of pinned memory takes for a block."""
    return 1 << max(0, num_bytes - 1).bit_length()


def descriptors_of(job: Job, num_sources: int) -> int:
    """Files and sockets of one process.

    A socket to each other rank of every group of ranks: all, data, context, experts and their replicas, and all again
    in the group that shards weights.
    """
    sizes = job.parallel
    groups = (job.world, sizes.data, sizes.context, sizes.expert, job.world // sizes.expert, job.world)
    return FIXED_DESCRIPTORS + num_sources + sum(size - 1 for size in groups)


def shortages(needs: HostNeeds, machine: Machine, slack: float = 0.0) -> list[str]:
    """What a host lacks in memory, and what its processes may not take: setting, value, rule, remedy.

    Args:
        slack: part of a limit by which a need may exceed it unsaid, for what a plan does not know exactly.
    """
    found = []
    used = total(needs.memory)
    if used > machine.memory_bytes * (1 + slack):
        largest = sorted(needs.memory, key=lambda term: -term.num_bytes)[:3]
        found.append(
            f"host memory: {needs.ranks} rank{'s' * (needs.ranks > 1)} here need {size_bytes(used)}, and "
            f"{machine.memory_rule} is {size_bytes(machine.memory_bytes)}; most of it: "
            + ", ".join(f"{term.name} {size_bytes(term.num_bytes)}" for term in largest)
            + '; lower data.length or memory.tile, raise memory.keep_every, set memory.offload = "disk", or use a '
            "larger host"
        )
    if (
        needs.pinned is not None
        and machine.locked_bytes is not None
        and needs.pinned.exact > machine.locked_bytes
    ):
        found.append(
            f'memory.offload = "host": each rank pins {size_bytes(needs.pinned.exact)}, and a process may lock '
            f'{size_bytes(machine.locked_bytes)} (ulimit -l); raise that limit, or set memory.offload = "disk"'
        )
    if machine.open_files is not None and needs.descriptors > machine.open_files * (1 + slack):
        found.append(
            f"open files: each rank needs about {needs.descriptors:,} descriptors, and a process may have "
            f"{machine.open_files:,} (ulimit -n); raise that limit to {2 ** needs.descriptors.bit_length():,}"
        )
    return found + _shell_shortages(needs, machine, 1 + slack)


def _shell_shortages(needs: HostNeeds, machine: Machine, within: float) -> list[str]:
    """What the limits of a shell cut short that the machine itself has room for."""
    found, (what, num_bytes) = [], needs.largest_file
    if machine.address_bytes is not None and needs.mapped_bytes > machine.address_bytes * within:
        found.append(
            f"address space: each rank maps at least {size_bytes(needs.mapped_bytes)}, and a process may map "
            f"{size_bytes(machine.address_bytes)} (ulimit -v); raise that limit, or lower data.length or memory.tile"
        )
    if machine.file_bytes is not None and num_bytes > machine.file_bytes * within:
        found.append(
            f"size of a file: each rank writes {what} of {size_bytes(num_bytes)} into one, and a process may write "
            f"{size_bytes(machine.file_bytes)} (ulimit -f); raise that limit"
        )
    return found


def file_shortages(needs: HostNeeds, spool: Path, out: Path, keep: int) -> list[str]:
    """What the disks of the spool and of the run lack; on one disk both together.

    Args:
        keep: checkpoints kept; one more is written before the oldest is removed.
    """
    spooled, kept = total(needs.files), (keep + 1) * needs.checkpoint_bytes
    one_disk = existing(spool).stat().st_dev == existing(out).stat().st_dev
    found = []
    free = free_bytes(spool)
    if spooled and free is not None and spooled > free:
        found.append(
            f"memory.spool = {spool}: {needs.ranks} rank{'s' * (needs.ranks > 1)} here need {size_bytes(spooled)} "
            f"there, and {size_bytes(free)} are free; make room, set memory.spool to a folder on another disk, or "
            "raise memory.keep_every"
        )
    beside, free = (spooled if one_disk else 0), free_bytes(out)
    if free is not None and kept + beside > free:
        found.append(
            f"run.out = {out}: train.keep = {keep} checkpoints and one being written take {size_bytes(kept)}"
            + f", beside a spool of {size_bytes(beside)}" * bool(beside)
            + f", and {size_bytes(free)} are free; make room, lower train.keep, or set run.out to a folder on another "
            "disk"
        )
    return found


def check_host(job: Job, room: Room, *, num_sources: int, slack: float = 0.1) -> None:
    """Refuses a run that this host has clearly no room for; called before a run.

    Disks are judged where their files are made: a spool's by its ranks, a checkpoint's before the first step. Whether a
    block can be pinned the driver says when it is registered (`memory/host.py`): some do not count it as locked.

    Args:
        slack: as in `shortages`; a run that would fit by a tenth less is let through.

    Raises:
        UserError: each shortage with its numbers and a remedy.
    """
    machine = this_machine()
    allowed = replace(machine, memory_bytes=machine.memory_bytes + machine.swap_bytes, locked_bytes=None)
    refuse(shortages(host_needs(job, room, num_sources), allowed, slack))


def check_address_space() -> None:
    """Refuses a process without room for its libraries, of which some would end it without a word.

    Raises:
        UserError: with the limit.
    """
    limit = _soft(resource.RLIMIT_AS)
    if limit is not None and limit < MAPPED_BYTES["cpu"]:
        raise UserError(
            f"address space: torch and a run's libraries map {size_bytes(MAPPED_BYTES['cpu'])}, and a process may map "
            f"{size_bytes(limit)} (ulimit -v); raise that limit"
        )


def refuse(found: Sequence[str]) -> None:
    """Raises a UserError with every shortage, if there is one."""
    if found:
        raise UserError("this host has no room for the run: " + "; and ".join(found))


def _memory_limit() -> tuple[int, str, int]:
    """The smaller of what the machine has and what its cgroups allow, whose rule that is, and swap space."""
    kilobytes = _meminfo()
    limit, rule = kilobytes["MemTotal"] * 1024, "the memory of this machine"
    for file in _cgroup_limits():
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < limit:
            limit, rule = int(text), f"the limit of this cgroup ({file})"
    return limit, rule, kilobytes.get("SwapTotal", 0) * 1024


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return {"MemTotal": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024}
    return {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}


def _cgroup_limits() -> list[Path]:
    """Files that may hold a limit, of this process's cgroup and those around it."""
    files = [_CGROUPS / "memory" / "memory.limit_in_bytes", _CGROUPS / "memory.max"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return files
    for line in lines:
        inner = _CGROUPS / line.rpartition(":")[2].lstrip("/")
        if line.startswith("0::") and inner != _CGROUPS:
            files += [
                folder / "memory.max" for folder in (inner, *inner.parents) if _CGROUPS in folder.parents
            ]
    return files


def _soft(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft
