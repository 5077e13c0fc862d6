"""Values as HTML tables; every text is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from longstrand.wording import number, size_bytes

_DEEPEST = 4


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric_from: int = 1,
    caption: str = "",
    last_is_total: bool = False,
) -> str:
    """A table of texts: columns from `numeric_from` on are aligned right; the first cell heads its row."""
    columns = "".join(
        f'<th scope="col"{_right(place >= numeric_from)}>{html.escape(text)}</th>'
        for place, text in enumerate(head)
    )
    lines = [f"<tr>{_row(row, numeric_from)}</tr>" for row in rows]
    if last_is_total:
        lines[-1] = lines[-1].replace("<tr>", '<tr class="all">', 1)
    body = "".join(lines)
    content = f"<thead><tr>{columns}</tr></thead><tbody>{body}</tbody>"
    above = f'<p class="aside">{html.escape(caption)}</p>' if caption else ""
    return f'{above}<div class="scroll"><table>{content}</table></div>'


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, one pair a line."""
    lines = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in rows
    )
    return f'<dl class="pairs">{lines}</dl>'


def value_html(value: Any, depth: int = 0) -> str:
    """Any JSON value: records as pairs, lists of records as tables, what lies too deep as text."""
    if depth >= _DEEPEST:
        return f"<code>{html.escape(json.dumps(value, ensure_ascii=False)[:2000])}</code>"
    if isinstance(value, dict):
        return _record_html(value, depth)
    if isinstance(value, list):
        if any(value) and all(isinstance(item, dict) for item in value) and _is_flat(value):
            keys = list(dict.fromkeys(key for item in value for key in item))
            rows = [[_text(key, item.get(key)) for key in keys] for item in value]
            return table([words(key) for key in keys], rows, numeric_from=_first_number(value, keys))
        if all(not isinstance(item, dict | list) for item in value):
            return f"<p>{html.escape(', '.join(_text('', item) for item in value)) or 'none'}</p>"
        return "".join(value_html(item, depth + 1) for item in value)
    return f"<p>{html.escape(_text('', value))}</p>"


def words(key: str) -> str:
    """The name of a field as people read it."""
    return str(key).replace("_", " ")


def _record_html(record: dict[str, Any], depth: int) -> str:
    plain = [(words(key), _text(key, value)) for key, value in record.items() if _is_plain(value)]
    parts = [pairs(plain)] if plain else []
    nested = {key: value for key, value in record.items() if not _is_plain(value)}
    if len(nested) > 1 and all(isinstance(value, dict) for value in nested.values()):
        rows = [{"": key, **value} for key, value in nested.items()]
        if _is_flat(rows):
            return "".join(parts) + value_html(rows, depth + 1)
    for key, value in nested.items():
        level = min(3 + depth, 6)
        heading = f"<h{level}>{html.escape(words(key))}</h{level}>"
        parts.append(heading + value_html(value, depth + 1))
    return "".join(parts) or "<p>empty</p>"


def _row(cells: Sequence[str], numeric_from: int) -> str:
    first, *rest = (html.escape(cell) for cell in cells)
    return f'<th scope="row"{_right(numeric_from == 0)}>{first}</th>' + "".join(
        f"<td{_right(place >= numeric_from)}>{cell}</td>" for place, cell in enumerate(rest, start=1)
    )


def _right(yes: bool) -> str:
    return ' class="n"' if yes else ""


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 12 and all(not isinstance(item, dict | list) for item in value)
    return not isinstance(value, dict)


def _is_flat(rows: list[dict[str, Any]]) -> bool:
    return all(_is_plain(value) for row in rows for value in row.values())


def _first_number(rows: list[dict[str, Any]], keys: list[str]) -> int:
    """The column from which on all columns hold numbers."""
    first = len(keys)
    for place in range(len(keys) - 1, -1, -1):
        values = [row[keys[place]] for row in rows if row.get(keys[place]) is not None]
        if not values or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            break
        first = place
    return max(first, 1)


def _text(key: str, value: Any) -> str:
    if value is None:
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_text(key, item) for item in value) or "none"
    if isinstance(value, int):
        return size_bytes(value) if str(key).endswith("bytes") else f"{value:,}"
    if isinstance(value, float):
        return number(value, 0) if value.is_integer() else f"{value:,.4g}"
    return str(value)
