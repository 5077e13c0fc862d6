"""What a run really takes: peaks of memory and seconds by phase, measured in every run and written to memory.json."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longstrand.atomic import write_atomic
from longstrand.memory.counted import CountedMemory
from longstrand.parallel import Axis, by_first, from_all
from longstrand.peak_memory import SOURCE, PeakMemory

FILE = "memory.json"
NAMES = ("start", "forward", "backward", "optimizer", "evaluate", "save")
"""In the order in which they are shown; "start" is what a step begins with: weights, moments, data."""


@dataclass
class Phase:
    """One phase of this rank so far.

    Attributes:
        resident_bytes: the largest peak; anonymous resident memory of the process.
        counted_bytes: the largest peak of living tensors; None where they are not counted.
        seconds, cpu_seconds: of all times together.
        times: how often it has ended.
    """

    resident_bytes: int = 0
    counted_bytes: int | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    times: int = 0


class Phases:
    """Measures phase after phase: each one begins where the last one ended.

    Costs two readings of memory at each end (75 us), nothing in between but what `PeakMemory` and `CountedMemory` do.

    Args:
        memory: of the process; nothing else may take its peaks.
        device: of the model, for the bytes of living tensors.

    Attributes:
        found: by name.
        baseline: what lives before the model is loaded.
    """

    def __init__(self, memory: PeakMemory, device: torch.device) -> None:
        self._memory, self._counted = memory, CountedMemory(device)
        self._largest = 0
        self.found: dict[str, Phase] = {}
        self.begin()
        self.baseline = Phase(memory.baseline_bytes, self._counted.live())

    @property
    def has_heap(self) -> bool:
        """Whether large tensors of a CPU lie in the C library's heap, with its holes, though they are counted."""
        return self._counted.has_pages is False

    @property
    def why_not(self) -> str | None:
        """Why living tensors are not counted; None where they are."""
        return self._counted.why_not

    def begin(self) -> None:
        """A phase begins here: what was since the last end belongs to none."""
        self._read()
        self._began, self._used = time.perf_counter(), time.process_time()

    def begin_step(self) -> tuple[float, float]:
        """A step begins: what lives now is the phase "start"; returns the clock and this process's CPU time."""
        self._read()
        self._largest = 0
        resident, counted = self._read()
        self._add("start", Phase(resident, counted, 0.0, 0.0, 1))
        self._began, self._used = time.perf_counter(), time.process_time()
        return self._began, self._used

    def end(self, name: str) -> None:
        """The phase `name` ends, and the next one begins."""
        resident, counted = self._read()
        now, used = time.perf_counter(), time.process_time()
        self._add(name, Phase(resident, counted, now - self._began, used - self._used, 1))
        self._began, self._used = now, used

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """The phase `name`, from here to the end of the block."""
        self.begin()
        yield
        self.end(name)

    def take(self) -> int:
        """Largest resident bytes since the last call, whatever phases ended meanwhile."""
        self._read()
        largest, self._largest = self._largest, 0
        return largest

    def write(self, run: Path, world: Axis) -> None:
        """memory.json: the largest of all ranks by phase, seconds of the first; called by all ranks, written by one.

        A process that took no step, as one that resumes a finished run, leaves the file as it is.

        Raises:
            UserError: the disk does not take it.
        """
        if "start" not in self.found:
            return
        ranks = from_all(world, (self.baseline, self.found, self.why_not))
        by_first(world, lambda: write_atomic(run / FILE, json.dumps(_record(ranks), indent=1) + "\n"))

    def _read(self) -> tuple[int, int | None]:
        """Peaks since the last reading; living tensors first, since that frees what the next phase would begin with."""
        counted, resident = self._counted.take(), self._memory.take()
        self._largest = max(self._largest, resident)
        return resident, counted

    def _add(self, name: str, more: Phase) -> None:
        old = self.found.get(name, Phase())
        self.found[name] = Phase(
            max(old.resident_bytes, more.resident_bytes),
            _largest([old.counted_bytes, more.counted_bytes]),
            old.seconds + more.seconds,
            old.cpu_seconds + more.cpu_seconds,
            old.times + more.times,
        )


_OfRank = tuple[Phase, dict[str, Phase], str | None]


def _record(ranks: list[_OfRank]) -> dict[str, Any]:
    first = ranks[0][1]
    reasons = [reason for _, _, reason in ranks if reason is not None]
    phases = {
        name: {
            **_bytes([found[name] for _, found, _ in ranks if name in found]),
            "seconds": first[name].seconds,
            "cpu_seconds": first[name].cpu_seconds,
            "times": first[name].times,
        }
        for name in NAMES
        if name in first
    }
    return {
        "version": 1,
        "ranks": len(ranks),
        "resident": SOURCE,
        "not_counted": reasons[0] if reasons else None,
        "baseline": _bytes([baseline for baseline, _, _ in ranks]),
        "phases": phases,
    }


def _bytes(phases: list[Phase]) -> dict[str, int | None]:
    return {
        "resident_bytes": max(phase.resident_bytes for phase in phases),
        "counted_bytes": _largest([phase.counted_bytes for phase in phases]),
    }


def _largest(values: list[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
