"""The section about what was planned and what the run took: memory by phase, seconds of a step by term."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from longstrand.report.tables import pairs, table
from longstrand.series import is_number
from longstrand.wording import duration, number, percent, size_bytes

_TERMS = 8  # the largest ones are shown, the others as one row
_DASH = "\u2013"

Record = Mapping[str, Any]


def planned_html(
    plan: Record | None,
    memory: Record | None,
    damaged: Sequence[str],
    seconds: Sequence[float],
    cpu_seconds: Sequence[float],
) -> str:
    """Planned beside measured; empty without a file of either.

    Args:
        damaged: a sentence about each file that cannot be used, which is then None.
        seconds, cpu_seconds: of each step.
    """
    if plan is None and memory is None and not damaged:
        return ""
    parts = [
        _memory(plan, memory),
        _largest_bytes(plan),
        _time(plan, memory, seconds, cpu_seconds),
        _largest_seconds(plan),
    ]
    problems = [*damaged, *(plan or {}).get("problems", [])]
    names = {sentence.partition(":")[0] for sentence in damaged}
    if plan is None and "plan.json" not in names:
        problems.append("plan.json is absent: nothing was planned.")
    if memory is None and "memory.json" not in names:
        problems.append("memory.json is absent: the run has not measured its phases.")
    return "".join(parts) + "".join(_aside(str(problem)) for problem in problems)


def _memory(plan: Record | None, memory: Record | None) -> str:
    """Bytes of tensors judge the plan; what is resident stands beside them and is not planned."""
    planned = ((plan or {}).get("memory") or {}).get("phases", {})
    measured = (memory or {}).get("phases", {})
    rows = []
    for phase in dict.fromkeys([*planned, *measured]):
        expected = _sum(planned[phase]) if phase in planned else None
        counted, resident = (_above(memory, phase, key) for key in ("counted_bytes", "resident_bytes"))
        judged = _DASH if counted is None else _compared(expected, counted, "than counted")
        rows.append([phase, *map(_size, (expected, counted)), judged, _size(resident)])
    if not rows:
        return ""
    head = ["phase", "planned", "counted", "the plan is", "resident"]
    caption = (
        "Most bytes of tensors that live at once in each phase, on the rank with the most: as planned, and as counted "
        "where torch allocates them. The plan is judged by these; what is resident stands beside."
    )
    return table(head, rows, caption=caption) + _measured_how(memory)


def _measured_how(memory: Record | None) -> str:
    """What the measured numbers are over, what resident ones hold beside, and what is not counted."""
    if memory is None:
        return ""
    own = size_bytes(memory["baseline"]["resident_bytes"])
    text = _aside(
        f"Resident: what the system gave the process above its own {own} without a model. It holds beside the tensors "
        "what libraries take once they are used, their scratch, data, and in bfloat16 what oneDNN keeps for each shape "
        "of a product: about 100 MiB however long the sequence."
    )
    reason = memory.get("not_counted")
    if isinstance(reason, str):
        text += _aside(f"Bytes of tensors are not counted, so nothing judges the plan: {reason}.")
    return text


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
    peak = max(planned["phases"], key=lambda name: _sum(planned["phases"][name]))
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
    expected = None if planned is None else sum(term["seconds"] for term in planned["terms"])
    if expected is not None:
        facts.append(("a step, planned", _seconds(expected)))
    measured = [("a step, measured (median)", seconds)]
    if (plan or {}).get("device_kind") == "cpu" and (plan or {}).get("threads") == 1:
        measured.append(("its CPU time, whatever else the machine did", cpu_seconds))
    for name, found in measured:
        if found:
            taken = median(found[1:] or found)
            facts += [(name, _seconds(taken)), ("the plan is", _compared(expected, taken, "than measured"))]
    phases = (memory or {}).get("phases", {})
    steps = phases.get("start", {}).get("times", 0)
    for name, phase in phases.items():
        if name in ("forward", "backward", "optimizer") and steps and is_number(phase.get("seconds")):
            facts.append((f"{name}, mean of all steps with the first", _seconds(phase["seconds"] / steps)))
    return f"<h3>Time</h3>{pairs(facts)}" if facts else ""


def _largest_seconds(plan: Record | None) -> str:
    planned = (plan or {}).get("seconds")
    if planned is None or not planned["terms"]:
        return ""
    whole = sum(term["seconds"] for term in planned["terms"]) or 1.0
    rows = [
        [
            term["name"],
            _seconds(term["seconds"]),
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


def _seconds(value: float) -> str:
    return duration(value) if value >= 1 else f"{number(value, 3)} s"


def _size(value: float | None) -> str:
    return _DASH if value is None else size_bytes(value)


def _compared(planned: float | None, measured: float, than: str) -> str:
    """How far a plan is from what was measured, in words, as a part of the latter."""
    if planned is None or measured <= 0:
        return _DASH
    relative = planned / measured - 1
    if abs(relative) < 0.0005:
        return "the same"
    return f"{percent(abs(relative))} {'more' if relative > 0 else 'less'} {than}"


def _sum(terms: Sequence[Record]) -> float:
    return sum(term["num_bytes"] for term in terms)


def _aside(text: str) -> str:
    return f'<p class="aside">{html.escape(text)}</p>'
