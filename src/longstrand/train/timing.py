"""The record of a step: what it did, how long it took, how much memory, how long is left."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from longstrand.train.phases import Phases
from longstrand.train.step import StepResult


class StepTimer:
    """Times steps; the remaining time is the median of the last 16 times the steps that are left."""

    def __init__(self, steps: int, phases: Phases) -> None:
        self._steps = steps
        self._phases = phases
        self._recent: deque[float] = deque(maxlen=16)
        self._started = self._used = 0.0

    def start(self) -> None:
        """Begins a step; what was held since the last one is forgotten."""
        self._started, self._used = self._phases.begin_step()

    def record(self, step: int, result: StepResult) -> dict[str, Any]:
        """The line of metrics.jsonl of the step that ends now."""
        seconds = time.perf_counter() - self._started
        self._recent.append(seconds)
        optional = {"indexer_kl", "expert_load_max_over_mean"}
        kept = {name: v for name, v in asdict(result).items() if v is not None or name not in optional}
        return {
            "step": step,
            **kept,
            "seconds": seconds,
            "cpu_seconds": time.process_time() - self._used,
            "tokens_per_second": result.tokens / seconds,
            "peak_memory_bytes": self._phases.take(),
            "remaining_seconds": (self._steps - step) * statistics.median(self._recent),
        }
