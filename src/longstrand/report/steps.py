"""metrics.jsonl as the report reads it: one record per step, and what no run writes into it, counted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstrand.errors import UserError
from longstrand.series import is_count, is_number
from longstrand.wording import count, one_line

LARGEST = 1e300  # far above what a run measures: beyond it a sum of steps, or an axis, leaves float64


@dataclass(frozen=True)
class Steps:
    """What the file holds.

    Args:
        records: one per step, the last line of it, steps increasing.
        torn: whether the last line is incomplete.
        odd: a sentence about each kind of line that no run writes: a resumed one cuts what it does again.
    """

    records: list[dict[str, Any]]
    torn: bool
    odd: tuple[str, ...]


def read_steps(path: Path, text: str) -> Steps:
    """The records of a metrics.jsonl.

    Raises:
        UserError: a line that is not the last one is not a record.
    """
    lines, torn = text.split("\n"), False
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                torn = True
                continue
            raise UserError(
                f"{path}, line {number}: not valid JSON ({one_line(error)}); remove the line"
            ) from error
        if not isinstance(record, dict):
            raise UserError(
                f"{path}, line {number}: {_short(record)}: must be a record, a JSON object; remove the line"
            )
        step = record.get("step")
        if not is_count(step):
            raise UserError(
                f"{path}, line {number}: step = {_short(step)}: must be a whole number from 0; remove the line"
            )
        found.append(record)
    last = {record["step"]: record for record in found}
    records = [last[step] for step in sorted(last)]
    return Steps(
        records, torn, tuple(f"{path.name}: {each}." for each in [*_order(found), *_values(records)])
    )


def is_shown(value: Any) -> bool:
    """Whether a value of a step is a finite number, and one that can be drawn and added up."""
    return is_number(value) and abs(value) <= LARGEST


def _order(found: list[dict[str, Any]]) -> Iterable[str]:
    """What is wrong with the steps: again, back, absent."""
    repeated, back, seen, latest = [], [], set(), 0
    for record in found:
        step = record["step"]
        repeated += [step] * (step in seen)
        back += [step] * (step < latest)
        seen.add(step)
        latest = max(latest, step)
    absent = latest - len(seen - {0})
    if repeated:
        yield f"{_lines(len(repeated))} a step again, first {count(repeated[0])}; the last line of a step counts"
    if back:
        yield f"{_lines(len(back))} a step after a later one, first {count(back[0])}; shown in order of steps"
    if absent:
        first = next(step for step in range(1, latest) if step not in seen)
        noun = "steps are" if absent > 1 else "step is"
        yield f"{count(absent)} {noun} absent up to the last one, {count(latest)}; the first is {count(first)}"


def _values(records: list[dict[str, Any]]) -> Iterable[str]:
    """What is no number, though every field of a step is one, or None; and what is too large to draw."""
    fields = dict.fromkeys(name for record in records for name in record if name != "step")
    for name in fields:
        present = [record for record in records if record.get(name) is not None]
        kinds = {
            "not a finite number": [record for record in present if not is_number(record[name])],
            f"beyond {LARGEST:g}": [
                record for record in present if is_number(record[name]) and not is_shown(record[name])
            ],
        }
        for kind, odd in kinds.items():
            if odd:
                shown, step = _short(odd[0][name]), count(odd[0]["step"])
                yield (
                    f"{name} is {kind} at {count(len(odd))} of {count(len(records))} steps, first {shown} at "
                    f"step {step}; left out of figures and sums"
                )


def _lines(number: int) -> str:
    return f"{count(number)} line{'s hold' if number > 1 else ' holds'}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 20 else f"{text[:20]}..."
