"""The section about which form of each op ran, from kernels.json."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from longstrand.report.tables import table, value_html
from longstrand.series import is_number
from longstrand.wording import places

TEXTS = ("op", "runs_in", "why", "padding")


def flaw_of_forms(found: Any) -> str | None:
    """What is wrong with the value of a kernels.json; None where it is as this or an older train writes it."""
    if not isinstance(found, dict):
        return "not a record"
    if _is_record(found):
        return None if found["layers"] else "layers is empty"
    older = [form.get("implementation") if isinstance(form, dict) else form for form in found.values()]
    return (
        None
        if older and all(isinstance(form, str) for form in older)
        else "does not say which form of each op ran"
    )


def forms_html(found: Any) -> str:
    """A sentence and a table with equal layers together; of an older run, or anything else, the values as they are."""
    if found is None:
        return ""
    if not _is_record(found):
        return "<p>Chosen once at the start; nothing falls back silently.</p>" + value_html(found)
    sentence = (
        f"Chosen once at the start, on the {found['device']} in {found['dtype']}; nothing falls back silently. "
        f"CPU kernels: {found['cpu']}; required: {found['require']}."
    )
    rows = []
    for group in found["layers"]:
        where = places(group["layers"])
        title = where if where == group["kind"] else f"{where}: {group['kind']}"
        for number, op in enumerate(group["ops"]):
            rows.append([title if number == 0 else "", op["op"], op["runs_in"], op["why"], _padding(op)])
    head = ["layers", "op", "runs in", "why", "padding"]
    tokens, tile = found["tokens"], found["tile"]
    caption = f"Padding: computed beyond what is needed, at {tokens:,} tokens in tiles of {tile:,}."
    return f"<p>{html.escape(sentence)}</p>" + table(head, rows, numeric_from=len(head), caption=caption)


def _padding(op: Mapping[str, Any]) -> str:
    return f"{op['padding_percent']:.4g} %: {op['padding']}" if op["padding"] else "0"


def _is_record(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and all(isinstance(found.get(key), str) for key in ("device", "dtype", "cpu", "require"))
        and all(isinstance(found.get(key), int) for key in ("tokens", "tile"))
        and isinstance(found.get("layers"), list)
        and all(_is_group(group) for group in found["layers"])
    )


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("kind"), str)
        and isinstance(group.get("layers"), list)
        and bool(group["layers"])
        and all(isinstance(place, int | str) for place in group["layers"])
        and isinstance(group.get("ops"), list)
        and all(_is_op(op) for op in group["ops"])
    )


def _is_op(op: Any) -> bool:
    return (
        isinstance(op, dict)
        and all(isinstance(op.get(key), str) for key in TEXTS)
        and is_number(op.get("padding_percent"))
    )
