"""Turns a refused recipe into one line: the setting, its value, the rule and the remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from longstrand.config.fields import Path, all_settings, dotted, field_at, fields_in, record_of
from longstrand.config.writing import toml_value

# What other trainers call our settings.
_ELSEWHERE = {
    "learning_rate": "train.lr",
    "epochs": "train.steps",
    "num_epochs": "train.steps",
    "num_train_epochs": "train.steps",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "batch_size": "train.sequences_per_step",
    "per_device_train_batch_size": "train.sequences_per_step",
    "gradient_accumulation_steps": "train.sequences_per_step",
    "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.clip",
    "grad_clip": "train.clip",
    "warmup": "train.warmup_steps",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep",
    "seq_len": "data.length",
    "max_length": "data.length",
    "max_seq_length": "data.length",
    "sequence_length": "data.length",
    "cutoff_len": "data.length",
    "train_file": "data.sources",
    "dataset": "data.sources",
    "output_dir": "run.out",
    "num_threads": "run.threads",
    "precision": "run.dtype",
    "model_name_or_path": "model.path",
    "chunk_size": "memory.tile",
    "gradient_checkpointing": "memory.keep_every",
    "cpu_offload": "memory.offload",
    "offload_folder": "memory.spool",
}


def describe_refusal(error: ValidationError, values: dict[str, Any]) -> tuple[Path, str]:
    """The place and the one-line message of the first problem; further ones are counted in it."""
    details = sorted(error.errors(include_url=False), key=lambda d: d["type"] != "extra_forbidden")
    places = {_place(d["loc"]) for d in details}
    path = _place(details[0]["loc"])
    problem = _describe(details[0], path, values)
    more = len(places) - 1
    return path, problem + (f" ({more} more setting{'s' * (more > 1)} refused)" if more else "")


def nearest_name(path: Path) -> str:
    """A remedy for an unknown setting: the valid name that is nearest to it, with its section."""
    section, key = dotted(path[:-1]), str(path[-1])
    own, known = list(fields_in(path[:-1])), list(all_settings())
    spelled = key.lower().replace("-", "_")
    if spelled in own:
        return f'did you mean "{spelled}"?'
    elsewhere = [place for place in known if place.rpartition(".")[2] == spelled]
    if elsewhere:
        return f"it belongs to [{elsewhere[0].rpartition('.')[0]}], as {elsewhere[0]}"
    if near := closest(spelled, own):
        return f'did you mean "{near}"?'
    names = {place.rpartition(".")[2]: place for place in reversed(known)} | _ELSEWHERE
    if near := closest(spelled, names):
        there, _, name = names[near].rpartition(".")
        return f'did you mean "{name}"?' if there == section else f"did you mean {names[near]}?"
    return f"valid {'here' if section else 'sections'}: {', '.join(own)}"


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that is spelled most like `name`, if any is."""
    found = difflib.get_close_matches(name, list(names), 1, cutoff=0.6)
    return found[0] if found else None


def _place(loc: Sequence[str | int]) -> Path:
    """The part of pydantic's location that names a setting, without the branches of a union."""
    path: Path = ()
    for depth, part in enumerate(loc):
        fields = fields_in(path)
        if isinstance(part, str) and (not fields or (part not in fields and depth < len(loc) - 1)):
            break
        path = (*path, part)
    return path


def _value_at(path: Path, values: Any) -> Any:
    for part in path:
        values = values[part]
    return values


def _describe(error: ErrorDetails, path: Path, values: dict[str, Any]) -> str:
    if error["type"] == "missing" and isinstance(path[-1], int):
        path = path[:-1]
    name, field = dotted(path), field_at(path)
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown setting; {nearest_name(path)}"
    if error["type"] == "missing" and path == _place(error["loc"]):
        return f"{name}: not set, and it has no default; {_remedy(path, None)}"
    if error["type"] == "value_error" and (field is None or record_of(field)):
        return f"{name}{'.' if name else ''}{_text(error)}"
    return f"{name} = {show(_value_at(path, values))}: {_rule(error, path)}; {_remedy(path, error)}"


def _text(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ")


def _rule(error: ErrorDetails, path: Path) -> str:
    field = field_at(path)
    extra = field.json_schema_extra if field else None
    if isinstance(extra, dict) and "rule" in extra:
        return str(extra["rule"])
    context = error.get("ctx", {})
    rules = {
        "literal_error": "must be " + str(context.get("expected", "")).replace("'", '"'),
        "int_type": "must be a whole number, without a decimal point, an exponent or quotes",
        "float_type": "must be a number, without quotes",
        "bool_type": "must be true or false",
        "string_type": "must be text, in quotes",
        "string_too_short": "must not be empty",
        "list_type": "must be a list in square brackets",
        "tuple_type": "must be a list of two numbers",
        "model_type": "must be a table of settings",
        "finite_number": "must be a finite number",
        "too_short": f"must have {context.get('min_length')} or more entries",
        "too_long": f"must have {context.get('max_length')} or fewer entries",
        "greater_than": f"must be greater than {context.get('gt')}",
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "less_than": f"must be less than {context.get('lt')}",
        "less_than_equal": f"must be at most {context.get('le')}",
        "value_error": _text(error),
    }
    return rules.get(error["type"], error["msg"])


def _remedy(path: Path, error: ErrorDetails | None) -> str:
    field, kind = field_at(path), error["type"] if error else "missing"
    value: Any = error["input"] if error else None
    if kind in ("float_type", "int_type") and _is_number(value):
        return f"write {float(value)!r}" if kind == "float_type" else f"write {float(value):.0f}"
    if kind == "string_type" and not isinstance(value, dict | list):
        return f"write {show(str(value))}"
    if field is not None and field.examples:
        return f"for example {show(field.examples[0])}"
    if field is None or field.is_required() or field.default is None or record_of(field):
        return "see longstrand config show"
    return f"the default is {show(field.default)}"


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def show(value: Any) -> str:
    """A value as TOML writes it, cut after 60 characters."""
    text = toml_value(value)
    return text if len(text) <= 60 else text[:57] + "..."
