"""The section about what was planned and what the run took: memory by phase, seconds of a step by term."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from longstrand.errors import UserError
from longstrand.report.tables import pairs, table
from longstrand.series import is_number
from longstrand.wording import duration, number, percent, size_bytes

_TERMS = 8  # the largest ones are shown, the others as one row
_DASH = "\u2013"
_MINUS = "\u2212"

Record = Mapping[str, Any]


def check_plan(path: Path, found: Any) -> Any:
    """The value of a plan.json that train has written; None where there is none.

    Raises:
        UserError: it has another form.
    """
    if found is None:
        return None
    whole = isinstance(found, dict) and isinstance(found.get("problems"), list)
    memory, seconds = (found.get("memory"), found.get("seconds")) if whole else (None, None)
    if memory is not None:
        phases = memory.get("phases") if isinstance(memory, dict) else None
        whole = isinstance(phases, dict) and all(_are_terms(terms, "num_bytes") for terms in phases.values())
        whole = whole and _are_terms(memory.get("elsewhere"), "num_bytes")
    if seconds is not None:
        whole = whole and isinstance(seconds, dict) and _are_terms(seconds.get("terms"), "seconds")
    if not whole:
        raise UserError(f"{path}: not a plan as train writes it; the file is damaged")
    return found


def check_memory(path: Path, found: Any) -> Any:
    """The value of a memory.json that train has written; None where there is none.

    Raises:
        UserError: it has another form.
    """
    if found is None:
        return None
    phases = found.get("phases") if isinstance(found, dict) else None
    if (
        not isinstance(phases, dict)
        or not _is_measured(found.get("baseline"))
        or not all(_is_measured(each) and is_number(each.get("times")) for each in phases.values())
    ):
        raise UserError(f"{path}: not what train writes about memory; the file is damaged")
    return found


def planned_html(
    plan: Record | None, memory: Record | None, seconds: Sequence[float], cpu_seconds: Sequence[float]
) -> str:
    """Predicted beside measured; empty without a file of either.

    Args:
        seconds, cpu_seconds: of each step.
    """
    if plan is None and memory is None:
        return ""
    parts = [
        _memory(plan, memory),
        _largest_bytes(plan),
        _time(plan, memory, seconds, cpu_seconds),
        _largest_seconds(plan),
    ]
    problems = [*(plan or {}).get("problems", [])]
    if plan is None:
        problems.append("plan.json is absent: nothing was predicted.")
    if memory is None:
        problems.append("memory.json is absent: the run has not measured its phases.")
    notes = "".join(f'<p class="aside">{html.escape(str(problem))}</p>' for problem in problems)
    return "".join(parts) + notes


def _memory(plan: Record | None, memory: Record | None) -> str:
    planned = ((plan or {}).get("memory") or {}).get("phases", {})
    measured = (memory or {}).get("phases", {})
    rows = []
    for phase in dict.fromkeys([*planned, *measured]):
        predicted = sum(term["num_bytes"] for term in planned[phase]) if phase in planned else None
        counted, resident = (_above(memory, phase, key) for key in ("counted_bytes", "resident_bytes"))
        row = [phase, _size(predicted), _size(counted), _difference(predicted, counted)]
        rows.append([*row, _size(resident), _difference(predicted, resident)])
    if not rows:
        return ""
    head = ["phase", "predicted", "living tensors", "off by", "resident", "off by"]
    return table(head, rows, caption="Peaks by phase, of the rank with the most. " + _baseline(memory))


def _baseline(memory: Record | None) -> str:
    """What the numbers are over, and what is not counted."""
    if memory is None:
        return ""
    held = size_bytes(memory["baseline"]["resident_bytes"])
    text = f"Measured ones are above the process without a model ({held} resident)."
    reason = memory.get("not_counted")
    return f"{text} Living tensors are not counted: {reason}." if isinstance(reason, str) else text


def _above(memory: Record | None, phase: str, key: str) -> float | None:
    """A measured peak over what lived before the model was loaded."""
    found = (memory or {}).get("phases", {}).get(phase, {}).get(key)
    base = (memory or {}).get("baseline", {}).get(key)
    return None if found is None or base is None else found - base


def _largest_bytes(plan: Record | None) -> str:
    """The terms at the peak of the step, and what lies elsewhere."""
    planned = (plan or {}).get("memory")
    if planned is None or not planned["phases"]:
        return ""
    peak = max(planned["phases"], key=lambda name: sum(term["num_bytes"] for term in planned["phases"][name]))
    terms = [*planned["phases"][peak], *planned["elsewhere"]]
    rows = [
        [term["name"], size_bytes(term["num_bytes"]), term["place"], term["why"], term["evidence"]]
        for term in _shortened(terms, "num_bytes")
    ]
    head = ["term", "bytes", "where", "why", "evidence"]
    caption = f"What the largest phase, {peak}, holds by the plan."
    return table(head, rows, numeric_from=len(head), caption=caption)


def _time(
    plan: Record | None, memory: Record | None, seconds: Sequence[float], cpu_seconds: Sequence[float]
) -> str:
    """The first step is left out where there are more: it fills caches."""
    facts: list[tuple[str, str]] = []
    planned = (plan or {}).get("seconds")
    predicted = None if planned is None else sum(term["seconds"] for term in planned["terms"])
    if predicted is not None:
        facts.append(("a step, predicted", duration(predicted)))
    measured = [("a step, measured (median)", seconds)]
    if (plan or {}).get("device_kind") == "cpu" and (plan or {}).get("threads") == 1:
        measured.append(("its CPU time, whatever else the machine did", cpu_seconds))
    for name, found in measured:
        if found:
            taken = median(found[1:] or found)
            facts += [(name, duration(taken)), ("prediction off by", _difference(predicted, taken))]
    phases = (memory or {}).get("phases", {})
    steps = phases.get("start", {}).get("times", 0)
    for name, phase in phases.items():
        if name in ("forward", "backward", "optimizer") and steps and is_number(phase.get("seconds")):
            facts.append((f"of it {name} (mean)", duration(phase["seconds"] / steps)))
    return f"<h3>Time</h3>{pairs(facts)}" if facts else ""


def _largest_seconds(plan: Record | None) -> str:
    planned = (plan or {}).get("seconds")
    if planned is None or not planned["terms"]:
        return ""
    whole = sum(term["seconds"] for term in planned["terms"]) or 1.0
    rows = [
        [
            term["name"],
            duration(term["seconds"]),
            percent(term["seconds"] / whole),
            term["why"],
            term["evidence"],
        ]
        for term in _shortened(planned["terms"], "seconds")
    ]
    head = ["term", "seconds", "of the step", "why", "evidence"]
    return table(head, rows, numeric_from=len(head), caption="Where the planned seconds go.")


def _shortened(terms: Sequence[Record], key: str) -> list[Record]:
    """The largest first; what comes after the `_TERMS` first is one row."""
    ordered = sorted(terms, key=lambda term: -float(term[key]))
    shown, rest = list(ordered[:_TERMS]), ordered[_TERMS:]
    if rest:
        names = ", ".join(term["name"] for term in rest)
        places = {term.get("place", "") for term in rest}
        place = places.pop() if len(places) == 1 else "several"
        left = {"name": f"{len(rest)} smaller", key: sum(term[key] for term in rest), "place": place}
        shown.append(left | {"why": names, "evidence": _DASH})
    return shown


def _size(value: float | None) -> str:
    return _DASH if value is None else size_bytes(value)


def _difference(predicted: float | None, measured: float | None) -> str:
    """How much larger the prediction is, in percent of what was measured."""
    if predicted is None or measured is None or measured <= 0:
        return _DASH
    relative = predicted / measured - 1
    text = number(100 * relative, 1)
    return f"{'' if text.startswith(_MINUS) or text == '0.0' else '+'}{percent(relative)}"


def _are_terms(terms: Any, key: str) -> bool:
    return isinstance(terms, list) and all(
        isinstance(term, dict)
        and is_number(term.get(key))
        and all(isinstance(term.get(text), str) for text in ("name", "why", "evidence"))
        and (key == "seconds" or isinstance(term.get("place"), str))
        for term in terms
    )


def _is_measured(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and is_number(value.get("resident_bytes"))
        and (value.get("counted_bytes") is None or is_number(value["counted_bytes"]))
    )
