"""The tree of a recipe's settings: which record a field holds, which settings there are."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from longstrand.config.records import Recipe

Path = tuple[str | int, ...]
"""The place of a setting: names of sections and settings, and numbers of list entries."""


def dotted(path: Path) -> str:
    """The name of a setting as `--set` takes it."""
    return ".".join(map(str, path))


def record_of(field: FieldInfo) -> type[BaseModel] | None:
    """The record that a field holds, alone, optionally or in a list."""
    return next(
        (t for t in _leaves(field.annotation) if isinstance(t, type) and issubclass(t, BaseModel)), None
    )


def is_list(field: FieldInfo) -> bool:
    """Whether a field holds a list."""
    return get_origin(field.annotation) is list


def fields_in(path: Path) -> dict[str, FieldInfo]:
    """The settings of the section at a path; none where the path names no section."""
    record: type[BaseModel] = Recipe
    for part in path:
        if isinstance(part, int):
            continue
        field = record.model_fields.get(part)
        inner = record_of(field) if field else None
        if inner is None:
            return {}
        record = inner
    return record.model_fields


def field_at(path: Path) -> FieldInfo | None:
    """The field that a path names, or the list that holds its entry."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    return fields_in(path[:-1]).get(str(path[-1])) if path else None


def all_settings(record: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """The dotted names of all sections and settings, outer ones first; entries of lists are left out."""
    yield from (prefix + name for name in record.model_fields)
    for name, field in record.model_fields.items():
        inner = record_of(field)
        if inner is not None and not is_list(field):
            yield from all_settings(inner, f"{prefix}{name}.")


def _leaves(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is not None:
        for part in get_args(annotation):
            yield from _leaves(part)
    else:
        yield annotation
