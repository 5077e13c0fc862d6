"""Writes a recipe as a TOML that explains itself: every setting, its description and its default."""

from __future__ import annotations

import datetime
import json
import math
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from longstrand.config.fields import is_list, record_of
from longstrand.config.records import Recipe

WIDTH = 110


def dump_toml(recipe: Recipe) -> str:
    """The recipe as commented TOML; reading it back gives an equal recipe.

    Settings that are absent stand commented out, so the text lists everything that can be set.
    """
    return "\n".join(_section_lines("", Recipe, recipe)).strip() + "\n"


def example_recipe() -> Recipe:
    """A small valid recipe: the example of each setting that has no default, and all defaults."""
    return Recipe.model_validate(
        {
            "run": {"out": "runs/first"},
            "model": {"config": "toy"},
            "data": {"sources": [{"path": "genome.fa.gz"}], "length": "16k", "split": {"by": "region"}},
            "train": {"steps": 100, "lr": 1e-4},
        }
    )


def toml_value(value: Any) -> str:
    """A value as TOML: text, number, truth value, date or time, list or inline table; `None` is `"none"`."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(v)}" for key, v in value.items()) + "}"
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return repr(value)


def _section_lines(
    name: str, record: type[BaseModel], values: BaseModel | None, off: str = ""
) -> Iterator[str]:
    """The lines of one table: its settings, then the tables inside it; `off` comments out what is absent."""
    later = []
    for key, field in record.model_fields.items():
        inner = record_of(field)
        if inner is not None:
            later.append((key, field, inner))
            continue
        value = getattr(values, key) if values is not None else _stand_in(field)
        absent = value is None and field.default is None
        text = toml_value(_stand_in(field) if absent else value)
        yield from _setting_lines(f"{'# ' if off or absent else ''}{key} = {text}", field)
    for key, field, inner in later:
        place = f"{name}.{key}" if name else key
        content = getattr(values, key) if values is not None else None
        for item in (content or [None]) if is_list(field) else [content]:
            mark = "# " if item is None else ""
            yield from ("", f"# {field.description}") if field.description else ("",)
            yield f"{mark}[[{place}]]" if is_list(field) else f"{mark}[{place}]"
            yield from _section_lines(place, inner, item, mark)


def _setting_lines(line: str, field: FieldInfo) -> Iterator[str]:
    default = "required" if field.is_required() else f"default {toml_value(field.default)}"
    if not field.is_required() and field.default is None:
        default = "absent by default"
    comment = f"# {field.description} ({default})"
    if len(line) + len(comment) + 2 > WIDTH:
        yield from textwrap.wrap(comment, WIDTH, subsequent_indent="#   ")
        yield line
    else:
        yield f"{line}  {comment}"


def _stand_in(field: FieldInfo) -> Any:
    if field.examples:
        return field.examples[0]
    return None if field.is_required() else field.default
