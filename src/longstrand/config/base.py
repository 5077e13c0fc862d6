"""What the records of a recipe share: strictness, lengths, and `"none"` for an absent value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

_LENGTH = re.compile(r"([0-9][0-9_]{0,29})([kKmM]?)")
_LENGTH_RULE = "must be a whole number of tokens, k (1,024) or M (1,048,576), and below 2**63"


def parse_length(value: object) -> int:
    """Tokens in a length: an integer, or text such as "131072", "512k" (524,288) or "1M" (1,048,576).

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _LENGTH.fullmatch(value.strip()) if isinstance(value, str) else None
    tokens = (
        int(match[1].replace("_", "")) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()] if match else 0
    )
    if match is None or tokens >= 2**63:
        raise ValueError(_LENGTH_RULE)
    return tokens


Length = Annotated[int, BeforeValidator(parse_length), Field(ge=2)]


def has_its_home(text: str) -> bool:
    """Whether a path that begins with "~" can be expanded on this machine."""
    try:
        Path(text).expanduser()
    except RuntimeError:
        return False
    return True


def _can_be_a_path(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold the character U+0000")
    if not has_its_home(text):
        raise ValueError('must be written in full: no home folder is known for its "~"')
    return text


Place = Annotated[str, Field(min_length=1), AfterValidator(_can_be_a_path)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _is_optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


class Record(BaseModel):
    """A strict, frozen part of a recipe; `"none"` stands for an absent value, which TOML cannot write."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if large := [n for n, v in values.items() if isinstance(v, int) and abs(v) >= 2**63]:
            raise ValueError(f"{large[0]} = {values[large[0]]}: must be below 2**63; lower it")
        absent = {
            n for n, field in cls.model_fields.items() if _is_optional(field) and values.get(n) == "none"
        }
        return {name: None if name in absent else value for name, value in values.items()}

    def _changed(self, name: str) -> bool:
        """Whether a setting differs from its default (a written-out default is no request)."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)
