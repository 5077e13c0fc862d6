"""Factors that turn a plan's estimated seconds into those that finished runs took; no torch.

A run has seconds of a step, and its plan's terms t_j in estimated seconds. One scale s for all terms makes the largest
part of the way. Then each term has a factor s g_j, with all g_j >= 0 and

    sum over runs of ((sum_j s g_j t_j) / measured - 1)^2 / NOISE^2  +  sum_j (g_j - 1)^2 / SPREAD^2   least,

so that a term that the runs tell nothing about stays at the common scale, and one that they determine moves freely.
Errors are relative: a short run counts as much as a long one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from longstrand.atomic import write_atomic
from longstrand.errors import UserError
from longstrand.plan.calibrated import LARGEST, VERSION, Origin, is_number, read_json, read_origin
from longstrand.plan.plan_files import flaw_of_memory, flaw_of_plan

NOISE = 0.03
"""Relative spread of a run's median step: two runs of the same settings differ by about that."""

SPREAD = 0.5
"""How far an estimate may be off, relative to the others."""

SMALL = 0.01
"""Of a step in every run: a term below it cannot be told, and keeps its estimate."""

FEWEST = 3
"""Runs of different settings."""

_REMEDY = "take the file as train wrote it, or leave this run out"


@dataclass(frozen=True)
class Measured:
    """A run as a calibration takes it.

    Attributes:
        terms: estimated seconds of a step, by name.
        seconds: what a step took.
        planned_bytes, counted_bytes: of the device at a step's peak; None: not known.
    """

    name: str
    terms: Mapping[str, float]
    seconds: float
    planned_bytes: int | None = None
    counted_bytes: int | None = None


@dataclass(frozen=True)
class Row:
    """One run, before and after; errors are predicted over measured, less 1.

    Attributes:
        left_out: error of a calibration on all other runs; None where they are too few.
        planned_bytes, counted_bytes: of the device at a step's peak; None: not known.
    """

    name: str
    seconds: float
    before: float
    after: float
    left_out: float | None
    planned_bytes: int | None = None
    counted_bytes: int | None = None


@dataclass(frozen=True)
class Calibration:
    """What finished runs say about a plan's seconds.

    Attributes:
        factors: of the terms, by name, for `plan_seconds(..., fitted=...)`.
        determined: the terms whose factor the runs determine, and find above 0; the others stay near the scale of all.
        rows: of the runs.
        notes: what was determined and what was not, in words.
        origin: what the runs were made on; None: not said.
    """

    factors: Mapping[str, float]
    determined: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    origin: Origin | None = None

    def as_dict(self) -> dict[str, Any]:
        """What `load_calibrated` reads, and each run's row."""
        return {
            "version": VERSION,
            "fitted_on": None if self.origin is None else asdict(self.origin),
            "factors": dict(self.factors),
            "determined": list(self.determined),
            "notes": list(self.notes),
            "runs": [asdict(row) for row in self.rows],
        }

    def write(self, path: Path) -> None:
        """As JSON.

        Raises:
            UserError: it cannot be written.
        """
        write_atomic(path, json.dumps(self.as_dict(), indent=1) + "\n")


def calibrate(runs: Sequence[Path]) -> Calibration:
    """Fits the terms of finished runs' plans to what their steps took.

    Raises:
        UserError: a folder lacks a file of a measured run, the runs are of several devices, or too few differ.
    """
    read = [_read_run(Path(run)) for run in runs]
    origins = list(dict.fromkeys(origin for origin, _ in read))
    if len(origins) > 1:
        raise UserError(
            f"--calibrate: the runs are of different devices, ops, dtypes or ranks ({'; '.join(map(str, origins))}); "
            "calibrate each apart"
        )
    found = replace(fit([measured for _, measured in read]), origin=origins[0])
    name, factor = max(found.factors.items(), key=lambda item: item[1])
    if factor > LARGEST:
        raise UserError(
            f"--calibrate: {name} took {factor:,.0f} x the estimate, and no factor may exceed {LARGEST:,.0f}: "
            "these steps are not what was planned; leave those runs out"
        )
    return found


def fit(measured: Sequence[Measured]) -> Calibration:
    """The factors, and how far predictions were off before and are after.

    Raises:
        UserError: fewer than `FEWEST` runs have settings of their own.
    """
    distinct = {
        frozenset((name, round(math.log(value), 1)) for name, value in run.terms.items() if value > 0)
        for run in measured
    }
    if len(distinct) < FEWEST:
        raise UserError(
            f"--calibrate: {len(measured)} runs of {len(distinct)} settings: it takes at least {FEWEST} that differ in "
            "length, tile or shape; add runs"
        )
    factors, determined, notes = _factors(measured)
    rows = []
    for place, run in enumerate(measured):
        others = [*measured[:place], *measured[place + 1 :]]
        left_out = _error(run, _factors(others)[0]) if len(others) >= FEWEST else None
        errors = _error(run, {}), _error(run, factors), left_out
        rows.append(Row(run.name, run.seconds, *errors, run.planned_bytes, run.counted_bytes))
    return Calibration(factors, tuple(determined), tuple(rows), tuple([*notes, _summary(rows)]))


def least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least |matrix x - wanted|^2.

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), algorithm NNLS.
    """
    count = matrix.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        pull = np.where(free, -np.inf, matrix.T @ (wanted - matrix @ x))
        if free.all() or pull.max() <= 1e-12:
            break
        free[int(pull.argmax())] = True
        while True:
            tried = np.zeros(count)
            tried[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
            bad = free & (tried <= 0)
            if not bad.any():
                break
            step = (x[bad] / np.maximum(x[bad] - tried[bad], 1e-300)).min()
            x = x + step * (tried - x)
            free &= x > 1e-14
        x = tried
    return x


def _factors(measured: Sequence[Measured]) -> tuple[dict[str, float], list[str], list[str]]:
    """Factors by name, the names that are determined, and what is to be said of them."""
    names = list(dict.fromkeys(name for run in measured for name in run.terms))
    table = np.array([[run.terms.get(name, 0.0) / run.seconds for name in names] for run in measured])
    shares = table / table.sum(axis=1, keepdims=True)
    told = [place for place in range(len(names)) if shares[:, place].max() >= SMALL]
    rest = table.sum(axis=1) - table[:, told].sum(axis=1)
    parts, wanted = table[:, told], 1 - rest
    whole = parts.sum(axis=1)
    scale = max(float(whole @ wanted / (whole @ whole)), 1e-6)
    prior = np.eye(len(told)) / SPREAD
    stacked = np.concatenate([scale * parts / NOISE, prior])
    moved = least_squares(stacked, np.concatenate([wanted / NOISE, prior.sum(axis=1)]))
    known = np.sqrt(np.linalg.inv(stacked.T @ stacked).diagonal())  # of each g, one standard deviation
    factors = {names[place]: scale * float(g) for place, g in zip(told, moved, strict=True)}
    notes = [f"all terms together: {scale:.3g} x the estimate"]
    sure_of = zip(told, moved, known, strict=True)  # at g = 0 the bound was found, and no value
    determined = [names[place] for place, g, sure in sure_of if g > 0 and sure < SPREAD / 2]
    for place, sure in zip(told, known, strict=True):
        name = names[place]
        fitted = f"{name}: {factors[name]:.3g} x the estimate, +- {scale * sure:.2g}"
        alone = "not determined by these runs alone" + ", 0 is the least it may be" * (not factors[name])
        notes.append(fitted if name in determined else f"{fitted}: {alone}")
    small = [name for place, name in enumerate(names) if place not in told]
    if small:
        notes.append(f"{', '.join(small)}: less than {SMALL:.0%} of every step; kept as estimated")
    return factors, determined, notes


def _error(run: Measured, factors: Mapping[str, float]) -> float:
    return sum(seconds * factors.get(name, 1.0) for name, seconds in run.terms.items()) / run.seconds - 1


def _summary(rows: Sequence[Row]) -> str:
    after = max(abs(row.after) for row in rows)
    text = f"largest error: {max(abs(row.before) for row in rows):.0%} before, {after:.0%} after"
    left = [abs(row.left_out) for row in rows if row.left_out is not None]
    return text + (
        f", {max(left):.0%} for a run that is left out" if left else "; too few runs to leave one out"
    )


def _read_run(run: Path) -> tuple[Origin, Measured]:
    """What a run's plan says of it, and the median of its steps but the first, which compiles and fills caches."""
    for name in ("plan.json", "metrics.jsonl"):
        if not (run / name).exists():
            raise UserError(f"{run}: has no {name}; give the folder of a run that this version has trained")
    file = run / "plan.json"
    plan = _read_checked(file, flaw_of_plan)
    if plan.get("seconds") is None:
        why = "; ".join(map(str, plan["problems"])) or "and it does not say why"
        raise UserError(f"{file}: has no seconds, so nothing to calibrate ({why}); leave this run out")
    tokens: Any = plan.get("tokens_per_step")
    if not is_number(tokens) or tokens <= 0:
        raise UserError(f"{file}: tokens_per_step = {tokens!r}: must be a number above 0; {_REMEDY}")
    terms = {term["name"]: float(term["seconds"]) for term in plan["seconds"]["terms"]}
    origin = read_origin(plan, file)
    alone = origin.device_kind == "cpu" and origin.ranks == origin.threads == 1
    taken = _steps(run / "metrics.jsonl", tokens, "cpu_seconds" if alone else "seconds")
    median = statistics.median(taken[1:] or taken)
    counted = _counted_bytes(run / "memory.json")
    return origin, Measured(str(run), terms, median, _planned_bytes(plan), counted)


def _read_checked(path: Path, flaw_of: Callable[[Any], str | None]) -> dict[str, Any]:
    found = read_json(path)
    if flaw := flaw_of(found):
        raise UserError(f"{path}: damaged: {flaw}; {_REMEDY}")
    return dict(found)


def _planned_bytes(plan: Mapping[str, Any]) -> int | None:
    """At the peak of a step; None where the planner refused."""
    memory = plan.get("memory")
    if memory is None:
        return None
    return max(
        (sum(int(term["num_bytes"]) for term in terms) for terms in memory["phases"].values()), default=None
    )


def _counted_bytes(path: Path) -> int | None:
    """The most living tensors of a step, over those of the process before; None where they were not counted."""
    if not path.exists():
        return None
    found = _read_checked(path, flaw_of_memory)
    base, phases = found["baseline"].get("counted_bytes"), found["phases"]
    counted = [
        phases[name].get("counted_bytes")
        for name in ("start", "forward", "backward", "optimizer")
        if name in phases
    ]
    return None if base is None or not counted or None in counted else int(max(counted)) - int(base)


def _steps(path: Path, tokens: float, key: str) -> list[float]:
    """Seconds of the steps that were as long as planned."""
    found = []
    for number, record in _records(path):
        if record.get(key) is None or record.get("tokens") is None:
            continue
        for name in (key, "tokens"):
            if not is_number(record[name]) or record[name] <= 0:
                raise UserError(
                    f"{path}, line {number}: {name} = {record[name]!r}: must be a number above 0; {_REMEDY}"
                )
        if abs(record["tokens"] / tokens - 1) < 0.05:
            found.append(float(record[key]))
    if not found:
        raise UserError(
            f"{path}: no step with {key} has the {tokens:,} tokens that were planned, so none can be compared; leave "
            "this run out"
        )
    return found


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines of a metrics.jsonl by number, but an incomplete last one, of a run that was killed."""
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}; {_REMEDY}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            why = str(error).splitlines()[0]
            raise UserError(f"{path}, line {number}: not valid JSON ({why}); {_REMEDY}") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {number}: not a record; {_REMEDY}")
        yield number, record
