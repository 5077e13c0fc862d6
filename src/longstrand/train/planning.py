"""plan.json: what the planner says of a run before its first step, beside memory.json and metrics.jsonl."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from longstrand.architecture import Architecture
from longstrand.atomic import write_atomic
from longstrand.config import Recipe
from longstrand.errors import UserError
from longstrand.ops.native import SUFFIX, native_state
from longstrand.plan.devices import GIB, Device, devices
from longstrand.plan.job import Job
from longstrand.plan.memory import plan_memory
from longstrand.plan.seconds import plan_seconds
from longstrand.plan.terms import Term

FILE = "plan.json"
MEMORY_TOLERANCE = 0.1
"""Of a device's memory as torch sees it to that of the planner's."""

_NO_FORM = ("NVIDIA", "GEFORCE", "TESLA", "GPU")
_log = logging.getLogger(__name__)


def write_plan(run: Path, recipe: Recipe, shape: Architecture, device: torch.device) -> None:
    """Writes what a rank will hold and how long a step will take.

    What the planner refuses stands there with its reason, and the run goes on.
    """
    write_atomic(run / FILE, json.dumps(plan_of(recipe, shape, device), indent=1) + "\n")


def plan_of(recipe: Recipe, shape: Architecture, device: torch.device) -> dict[str, Any]:
    """The plan of a resolved recipe as a record."""
    job = job_of(recipe, shape, device)
    known = planned_device(device)
    record: dict[str, Any] = {
        "version": 1,
        "device": known.name if known else str(device),
        "device_kind": job.kind,
        "form": job.form,
        "dtype": job.dtype,
        "ranks": job.world,
        "threads": job.threads,
        "tokens_per_step": job.length * job.sequences_per_step,
        "memory": None,
        "seconds": None,
        "problems": [],
    }
    try:
        memory = plan_memory(job)
        phases = {name: _records(terms) for name, terms in memory.phases.items()}
        record["memory"] = {"phases": phases, "elsewhere": _records(memory.elsewhere)}
    except UserError as error:
        _refused(record, f"memory is not planned: {error}")
    if known is None:
        _refused(
            record, f"seconds are not planned: {_described(device)} is not one of {', '.join(devices())}"
        )
        return record
    try:
        seconds = plan_seconds(job, known)
        record["seconds"] = {"total": seconds.total, "terms": [asdict(term) for term in seconds.terms]}
    except UserError as error:
        _refused(record, f"seconds are not planned: {error}")
    return record


def job_of(recipe: Recipe, shape: Architecture, device: torch.device) -> Job:
    """A resolved recipe as the planner knows it; kernels are compiled for CPUs alone."""
    if device.type != "cpu":
        return Job.of(recipe, shape, "portable", kind="gpu")
    native = native_state().used and getattr(torch, recipe.run.dtype) in SUFFIX
    threads = torch.get_num_threads()
    return Job.of(recipe, shape, "native" if native else "portable", started_threads=threads)


def planned_device(device: torch.device) -> Device | None:
    """The planner's device that this one is, by the words of its name and its memory; None where it knows none."""
    words, num_bytes = _words(_name(device)), _memory_bytes(device)
    for title, known in devices().items():
        if words == _words(title):
            off = abs(num_bytes / known.memory_bytes - 1) if num_bytes else 0.0
            return known if off <= MEMORY_TOLERANCE else None
    return None


def _words(name: str) -> list[str]:
    """Of a device's name, without those that say nothing beside its kind and memory.

    A data sheet of the planner is that of the form with most rates (SXM). Others, such as "PCIe", "NVL" or "Laptop",
    and parts of a device ("MIG") keep their word, and are none that it knows.
    """
    words = [word for word in re.split(r"[\s-]+", name.upper()) if word not in _NO_FORM]
    return [word for word in words if not re.fullmatch(r"80|\d{2,3}GB|HBM3E?|SXM\d?", word)]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _memory_bytes(device: torch.device) -> int | None:
    """None: the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _described(device: torch.device) -> str:
    num_bytes = _memory_bytes(device)
    return _name(device) + (f" with {num_bytes / GIB:.1f} GiB" if num_bytes else "")


def _records(terms: Sequence[Term]) -> list[dict[str, Any]]:
    return [asdict(term) for term in terms]


def _refused(record: dict[str, Any], why: str) -> None:
    record["problems"].append(why)
    _log.warning("%s", why)
