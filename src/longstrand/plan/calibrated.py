"""A calibration's file: factors of terms of seconds, the runs that they are of, and what they may be applied to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from longstrand.errors import UserError
from longstrand.plan.devices import Device
from longstrand.plan.job import Job
from longstrand.plan.seconds import Seconds, TimeTerm
from longstrand.wording import count, three_digits

VERSION = 2

LARGEST = 1000.0
"""A factor beyond it is of runs that were not what was planned."""

TERMS = (
    *("projections", "delta rule", "experts", "streams", "attention", "scores", "head"),
    *("elementwise", "gathers", "weights of tiles", "optimizer", "starts"),
    *("KDA summaries", "DSA latents", "MoE tokens", "weights gathered", "gradients reduced"),
    *("offload to host", "offload to disk", "optimizer's copies"),
)
"""Names of the terms of `plan_seconds`."""

_REMEDY = "write one with longstrand plan --calibrate RUN... --write FILE"


@dataclass(frozen=True)
class Origin:
    """What runs were made on: a plan.json says it of each."""

    device: str
    device_kind: str
    form: str
    dtype: str
    ranks: int
    threads: int

    def __str__(self) -> str:
        kind = "" if self.device.lower() == self.device_kind else f" ({self.device_kind})"
        return f"{self.device}{kind}, {self.form} ops, {self.dtype}, {self.spread}"

    @property
    def spread(self) -> str:
        """Ranks and their threads."""
        return (
            f"{_several(self.ranks, 'rank')} of {_several(self.threads, 'thread')}"
            if self.device_kind == "cpu"
            else _several(self.ranks, "rank")
        )

    @classmethod
    def of(cls, job: Job, device: Device) -> Origin:
        """What a job is planned for."""
        return cls(device.name, device.kind, job.form, job.dtype, job.world, job.threads)


@dataclass(frozen=True)
class Calibrated:
    """Factors and what they hold for.

    Attributes:
        file: where they were read.
        origin: of the runs.
        factors: by name of a term, at least 0.
        determined: the terms that the runs determined, none of them with a factor of 0; the other factors are
            near the scale of all terms.
    """

    file: str
    origin: Origin
    factors: tuple[tuple[str, float], ...]
    determined: frozenset[str]

    def require_same(self, job: Job, device: Device) -> None:
        """Refuses factors of another device, form of the ops or dtype.

        Raises:
            UserError: with what they were fitted on and what was asked.
        """
        asked = Origin.of(job, device)
        if replace(self.origin, ranks=asked.ranks, threads=asked.threads) != asked:
            raise UserError(
                f"--calibrated {self.file}: fitted on {self.origin}, and asked for {asked}: device, form of the ops "
                "and dtype must be the same; calibrate on runs of that kind, or leave it out"
            )

    def is_elsewhere(self, job: Job) -> bool:
        """Whether a job has other ranks or threads than the runs: then its seconds stay estimates."""
        other_threads = self.origin.device_kind == "cpu" and job.threads != self.origin.threads
        return job.world != self.origin.ranks or other_threads

    def explained(self, seconds: Seconds, job: Job) -> Seconds:
        """Seconds with these factors in them, each with what its factor rests on."""
        factors = dict(self.factors)
        elsewhere = self.is_elsewhere(job)

        def known(term: TimeTerm) -> TimeTerm:
            if term.name not in factors:
                return term
            factor = three_digits(factors[term.name])
            text = f"{factor} x the estimate, calibrated on {self.origin}"
            if term.name not in self.determined and not elsewhere:  # its estimate is as good as it was
                scaled = f"scaled by {factor} (runs on {self.origin}, which do not determine this term alone)"
                return replace(term, evidence=f"{term.evidence}; {scaled}")
            return replace(term, evidence=f"{'estimated' if elsewhere else 'measured'}: {text}")

        return Seconds(tuple(known(term) for term in seconds.terms))

    def as_dict(self) -> dict[str, Any]:
        """For a plan's JSON."""
        return {
            "file": self.file,
            "fitted_on": asdict(self.origin),
            "factors": dict(self.factors),
            "determined": sorted(self.determined),
        }


def load_calibrated(path: Path) -> Calibrated:
    """What a calibration wrote.

    Raises:
        UserError: it is no such file, of another version, or a factor is of no term or out of range.
    """
    found = read_json(path)
    if not isinstance(found, dict) or "factors" not in found:
        raise UserError(f"{path}: not a calibration; {_REMEDY}")
    if found.get("version") != VERSION:
        raise UserError(
            f"{path}: version = {found.get('version')!r}: must be {VERSION}, what this version writes; {_REMEDY}"
        )
    factors, determined = found["factors"], found.get("determined")
    if not isinstance(factors, dict) or not isinstance(determined, list):
        raise UserError(f"{path}: not a calibration; {_REMEDY}")
    for name, factor in factors.items():
        if name not in TERMS:
            raise UserError(
                f"{path}: factors has {name!r}, no term of a plan's seconds ({', '.join(TERMS)}); {_REMEDY}"
            )
        if not is_number(factor) or not 0 <= factor <= LARGEST:
            raise UserError(
                f"{path}: the factor of {name!r} is {factor!r}: must be a number from 0 to {LARGEST:,.0f}; {_REMEDY}"
            )
    pairs = tuple((name, float(factor)) for name, factor in factors.items())
    known = frozenset(str(name) for name in determined if factors.get(str(name), 0) > 0)
    return Calibrated(str(path), read_origin(found.get("fitted_on"), path), pairs, known)


def read_origin(found: Any, path: Path) -> Origin:
    """The six values of a plan.json or a calibration.

    Raises:
        UserError: one is missing or of another kind.
    """
    kinds: Mapping[str, type] = {
        **dict.fromkeys(("device", "device_kind", "form", "dtype"), str),
        **dict.fromkeys(("ranks", "threads"), int),
    }
    values = found if isinstance(found, dict) else {}
    for name, kind in kinds.items():
        value = values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(
                f"{path}: {name} = {value!r}: must be what a run was made on; take it as it was written"
            )
    return Origin(**{name: values[name] for name in kinds})


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        UserError: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not valid JSON ({str(error).splitlines()[0]}); take the file as it was written"
        ) from error


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and a whole one within 64 bits; JSON reads NaN, and true is none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _several(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'s' * (number != 1)}"
