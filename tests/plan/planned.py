"""Jobs and rooms that the planner's tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from longstrand.plan.devices import Device, find_device
from longstrand.plan.job import Job
from longstrand.plan.room import Room
from longstrand.plan.shapes import find_shape

REAL = find_shape("glm-5.3-flash").shape
SLICE = find_shape("glm-5.3-flash-4-layers").shape
TOY = find_shape("toy").shape


def toy_job(length: int = 65536, **changes: Any) -> Job:
    return replace(Job(TOY, length, dtype="float32"), **changes)


def with_memory(job: Job, **changes: Any) -> Job:
    return replace(job, memory=job.memory.model_copy(update=changes))


def with_ranks(job: Job, **changes: Any) -> Job:
    return replace(job, parallel=job.parallel.model_copy(update=changes))


def small_gpu(memory_bytes: float, per_host: int = 8) -> Device:
    """An H200 with another memory."""
    changes = {"name": "small", "memory_gib": memory_bytes / 2**30, "devices_per_host": per_host}
    return find_device("H200").model_copy(update=changes)


def small_room(memory_bytes: float, num_devices: int = 1, **changes: Any) -> Room:
    return replace(Room(small_gpu(memory_bytes), num_devices), **changes)
