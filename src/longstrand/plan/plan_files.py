"""plan.json and memory.json of a run, checked for what a report shows and a calibration takes."""

from __future__ import annotations

from typing import Any

from longstrand.plan.calibrated import is_number

VERSION = 1  # of both files
_LARGEST = 2.0**63


def flaw_of_plan(found: Any) -> str | None:
    """What is wrong with the value of a plan.json; None where it is as train writes it."""
    if flaw := _flaw_of_version(found):
        return flaw
    if not isinstance(found.get("problems"), list):
        return "problems is no list"
    memory, seconds = found.get("memory"), found.get("seconds")
    if memory is not None:
        phases = memory.get("phases") if isinstance(memory, dict) else None
        if not isinstance(phases, dict):
            return "memory has no phases"
        for name, terms in {**phases, "elsewhere": memory.get("elsewhere")}.items():
            if not _are_terms(terms, "num_bytes", ("name", "place", "why", "evidence")):
                return f"memory, {name}: not a list of terms with their bytes"
    if seconds is not None:
        terms = seconds.get("terms") if isinstance(seconds, dict) else None
        if not _are_terms(terms, "seconds", ("name", "why", "evidence")):
            return "seconds: not a list of terms with their seconds"
    return None


def flaw_of_memory(found: Any) -> str | None:
    """What is wrong with the value of a memory.json; None where it is as train writes it."""
    if flaw := _flaw_of_version(found):
        return flaw
    if flaw := _flaw_of_measured(found.get("baseline")):
        return f"baseline {flaw}"
    phases = found.get("phases")
    if not isinstance(phases, dict):
        return "it has no phases"
    for name, phase in phases.items():
        if flaw := _flaw_of_measured(phase):
            return f"{name} {flaw}"
        if not isinstance(phase.get("times"), int) or not _is_amount(phase["times"]):
            return f"{name}: not how often it ended"
        if not _is_amount(phase.get("seconds")):
            return f"{name}: no seconds"
    return None


def _flaw_of_version(found: Any) -> str | None:
    if not isinstance(found, dict):
        return "not a record"
    if found.get("version") != VERSION:
        return f"version = {found.get('version')!r}, and this longstrand reads {VERSION}"
    return None


def _are_terms(terms: Any, key: str, texts: tuple[str, ...]) -> bool:
    return isinstance(terms, list) and all(
        isinstance(term, dict)
        and _is_amount(term.get(key))
        and all(isinstance(term.get(text), str) for text in texts)
        for term in terms
    )


def _flaw_of_measured(value: Any) -> str | None:
    if not isinstance(value, dict) or "resident_bytes" not in value:
        return "has no bytes"
    for name in ("resident_bytes", "counted_bytes"):
        found = value.get(name)
        if not _is_amount(found) and (found is not None or name == "resident_bytes"):
            return f"has {name} = {found!r}: must be a number from 0"
    return None


def _is_amount(value: Any) -> bool:
    return is_number(value) and 0 <= value < _LARGEST
