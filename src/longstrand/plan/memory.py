"""Bytes that a rank holds at the peak of each phase of a step: the walk over layers and tiles, in sizes alone."""

from __future__ import annotations

from functools import cache

from longstrand.plan.job import Job
from longstrand.plan.sizes import Sizes
from longstrand.plan.terms import Memory, Term
from longstrand.plan.walk import walk_step


@cache
def plan_memory(job: Job) -> Memory:
    """What one rank of a job holds: on its device by phase, on its host and in files for the whole step."""
    sizes = Sizes(job)
    peaks = walk_step(sizes)
    phases = {
        phase: tuple(
            Term(name, num_bytes, "device", WHY.get(name, ""))
            for name, num_bytes in sorted(held.items(), key=lambda item: -item[1])
        )
        for phase, held in peaks.items()
    }
    return Memory(phases, ())


WHY: dict[str, str] = {}
