"""Seconds of a step, by term: operations, bytes moved and bytes exchanged, over what a device does of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from longstrand.plan.devices import Device
from longstrand.plan.job import Job
from longstrand.plan.links import exchange_work, host_optimizer_work, offload_work
from longstrand.plan.operations import Work, memory_work, product_work, start_work
from longstrand.plan.passes import Passes
from longstrand.plan.rates import per_second, share_of
from longstrand.wording import three_digits


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
        fitted: factors of the terms, by name, from finished runs (`plan --calibrate`); None: estimates. A term's
            evidence stays that of its estimate: `Calibrated.explained` says what a factor rests on.
    """
    passes = Passes(job)
    work = [*product_work(passes), *memory_work(passes), start_work(passes), *exchange_work(passes)]
    terms = [_term(each, job, device) for each in work]
    terms += _copies(passes, device, sum(term.seconds for term in terms))
    return Seconds(tuple(_calibrated(term, fitted or {}) for term in terms if term.seconds > 0))


def _copies(passes: Passes, device: Device, computing: float) -> Iterator[TimeTerm]:
    """Of what leaves the device: layer inputs move while tiles are computed, so only what takes longer counts."""
    job, offload, optimizer = passes.job, offload_work(passes), host_optimizer_work(passes)
    if offload is not None:
        whole = _term(offload, job, device)
        why = (
            f"{whole.why}: {three_digits(whole.seconds)} s of copies beside {three_digits(computing)} s of other work; "
            "what is left over"
        )
        left = max(0.0, whole.seconds - computing)
        yield replace(whole, seconds=left, why=why, evidence=_beside_work(whole.evidence))
    if optimizer is not None:
        yield _term(optimizer, job, device)


def _beside_work(evidence: str) -> str:
    """Of copies that share a machine with what they are beside: no rate of an idle one is measured there."""
    idle = evidence.removeprefix("measured: ")
    if idle == evidence:
        return evidence
    return f"estimated: as if other work slowed no copy, and it did to 0.5 to 0.9 GB/s; {idle}"


def _term(work: Work, job: Job, device: Device) -> TimeTerm:
    seconds = work.amount / per_second(work.rate, job, device, work.span)
    return TimeTerm(work.name, seconds, work.why, share_of(work.rate, job, device).evidence)


def _calibrated(term: TimeTerm, factors: Mapping[str, float]) -> TimeTerm:
    """As runs were fitted: the factor is one of the estimate that stands in their plans."""
    return replace(term, seconds=factors.get(term.name, 1.0) * term.seconds)
