"""Seconds of a step, by term: operations, bytes moved and bytes exchanged, over what a device does of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longstrand.plan.devices import Device
from longstrand.plan.job import Job


@dataclass(frozen=True)
class TimeTerm:
    """Seconds of one step on the slowest rank.

    Attributes:
        evidence: "measured: where", or "estimated: from what".
    """

    name: str
    seconds: float
    why: str
    evidence: str


@dataclass(frozen=True)
class Seconds:
    """A step's time; terms add up, since nothing is assumed to overlap unless a term says so."""

    terms: tuple[TimeTerm, ...]

    @property
    def total(self) -> float:
        return sum(term.seconds for term in self.terms)

    def tokens_per_second(self, job: Job) -> float:
        """Over all devices."""
        return job.length * job.sequences_per_step / self.total


def plan_seconds(job: Job, device: Device, fitted: Mapping[str, float] | None = None) -> Seconds:
    """How long a step takes.

    Args:
        fitted: factors of the terms, by name, from finished runs (`plan --calibrate`); None: estimates.
    """
    # A first sketch, until operations are counted here.
    active = 100e9 if job.shape.num_hidden_layers > 8 else 1e7
    rate = (device.bfloat16_tflops if job.dtype == "bfloat16" else device.float32_tflops) * 1e12 * 0.3
    tokens = job.length * job.sequences_per_step
    return Seconds((TimeTerm("products", tokens * active / rate / job.world, "all", "estimated: sketch"),))
