"""The data ledger as tables: what each source held, and what became of every letter."""

from __future__ import annotations

import html
from typing import Any

from longstrand.report.tables import pairs, table, value_html, words
from longstrand.series import is_count
from longstrand.wording import count

VERSION = 1


def flaw_of_ledger(found: Any) -> str | None:
    """What is wrong with the value of a data.json; None where it is as train writes it."""
    if not isinstance(found, dict):
        return "not a record"
    if found.get("version") != VERSION:
        return f"version = {found.get('version')!r}, and this longstrand reads {VERSION}"
    if not _is_ledger(found):
        return "sources: not a list of what was read"
    if not found["sources"]:
        return "sources is empty"
    for number, source in enumerate(found["sources"]):
        if not all(isinstance(source.get(key), str) for key in ("path", "format")):
            return f"sources, {number}: no path or no format"
        unit = "letters" if "letters" in source else "tokens"
        for part in (source, *source["split"].values()):
            if not is_count(part.get(unit)):
                return f"sources, {number}: {unit} = {part.get(unit)!r}: must be a whole number from 0"
    return None


def ledger_html(ledger: Any) -> str:
    """data.json as tables; one of another form is shown as it stands."""
    if not _is_ledger(ledger):
        return value_html(ledger)
    parts = [_source_html(source) for source in ledger["sources"]]
    if ledger.get("families"):
        parts.append("<h3>Families</h3>" + value_html(ledger["families"], 1))
    if ledger.get("policies"):
        parts.append(_folded("Policies that the data was read under", value_html(ledger["policies"], 1)))
    return "".join(parts)


def formats(ledger: Any) -> set[str]:
    """The formats of the sources, as far as the ledger names them."""
    sources = ledger.get("sources") if isinstance(ledger, dict) else None
    rows = sources if isinstance(sources, list) else []
    return {str(row["format"]) for row in rows if isinstance(row, dict) and "format" in row}


def _source_html(source: dict[str, Any]) -> str:
    unit = "letters" if "letters" in source else "tokens"
    facts = [("format", str(source.get("format", ""))), (unit, _count(source.get(unit)))]
    if source.get("weight", 1) != 1:
        facts.append(("weight", str(source["weight"])))
    for key in ("outside_regions", "named_by_several_regions", "unknown_tokens"):
        if source.get(key):
            facts.append((words(key), _count(source[key])))
    if source.get("read_as_n"):
        letters = [f"{letter} ({_count(number)})" for letter, number in source["read_as_n"].items()]
        facts.append(("letters read as N", ", ".join(letters)))
    parts = [f"<h3>{html.escape(str(source.get('path', 'source')))}</h3>", pairs(facts)]
    if source["split"]:
        parts += [_split_table(source["split"], unit), _loss_table(source["split"])]
    if source.get("shown_in_training"):
        parts.append("<h4>Shown in training</h4>" + value_html([source["shown_in_training"]], 2))
    if source.get("files"):
        parts.append(_folded("Files", value_html(source["files"], 2)))
    return "".join(parts)


def _split_table(split: dict[str, dict[str, Any]], unit: str) -> str:
    columns = {
        "records": "records",
        unit: unit,
        "documents": "documents",
        "trained_per_epoch": "targets",
        "longer_than_length_cut_into_windows": "cut into windows",
    }
    rows = [
        [name.replace("_", "-"), *(_count(part.get(key)) for key in columns)] for name, part in split.items()
    ]
    return table(["part", *columns.values()], rows)


def _loss_table(split: dict[str, dict[str, Any]]) -> str:
    """What is read and not learned from, with its cause; first tokens have no context to be predicted from."""
    rows = []
    for name, part in split.items():
        part_name = name.replace("_", "-")
        for cause, tokens in part.get("masked_per_epoch", {}).items():
            if tokens:
                rows.append([part_name, f"masked: {_cause(cause)}", "", _count(tokens)])
        if part.get("first_tokens"):
            rows.append([part_name, "first tokens of documents", "", _count(part["first_tokens"])])
        for cause, skipped in part.get("skipped", {}).items():
            counts = (_count(skipped.get(key)) for key in ("documents", "tokens"))
            rows.append([part_name, f"skipped: {_cause(cause)}", *counts])
    if not rows:
        return ""
    return "<h4>Not scored</h4>" + table(["part", "cause", "documents", "tokens"], rows, numeric_from=2)


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def _is_ledger(ledger: Any) -> bool:
    """Whether it has the form that `longstrand train` writes."""
    if not isinstance(ledger, dict) or not isinstance(ledger.get("sources"), list):
        return False
    return all(isinstance(source, dict) and _is_source(source) for source in ledger["sources"])


def _is_source(source: dict[str, Any]) -> bool:
    split, letters = source.get("split"), source.get("read_as_n", {})
    if not isinstance(split, dict) or not isinstance(letters, dict):
        return False
    for part in split.values():
        if not isinstance(part, dict) or not isinstance(part.get("masked_per_epoch", {}), dict):
            return False
        skipped = part.get("skipped", {})
        if not isinstance(skipped, dict) or not all(isinstance(cause, dict) for cause in skipped.values()):
            return False
    return True


def _count(value: Any) -> str:
    return count(value) if isinstance(value, int) else "\u2013" if value is None else str(value)


def _cause(name: str) -> str:
    return {"n": "N"}.get(name, words(name))
