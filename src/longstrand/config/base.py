"""What the records of a recipe share: strictness, lengths, and `"none"` for an absent value."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

_LENGTH = re.compile(r"([0-9][0-9_]*)([kKmM]?)")
_LENGTH_RULE = "must be a whole number of tokens, k (1,024) or M (1,048,576)"


def parse_length(value: object) -> int:
    """Tokens in a length: an integer, or text such as "131072", "512k" (524,288) or "1M" (1,048,576).

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _LENGTH.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(_LENGTH_RULE)
    return int(match[1].replace("_", "")) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


Length = Annotated[int, BeforeValidator(parse_length), Field(ge=2)]
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
        absent = {
            n for n, field in cls.model_fields.items() if _is_optional(field) and values.get(n) == "none"
        }
        return {name: None if name in absent else value for name, value in values.items()}

    def _changed(self, name: str) -> bool:
        """Whether a setting differs from its default (a written-out default is no request)."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)
