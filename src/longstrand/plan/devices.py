"""What a planner knows of a device: a few numbers, built in or from a TOML of one's own."""

from __future__ import annotations

import difflib
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from longstrand.config.base import Record
from longstrand.errors import UserError
from longstrand.plan.terms import Kind

GIB = 2**30

SHOWN = 40
"""Characters of a wrong value."""


MOST, LEAST = 1e6, 1e-6
"""Of rates, in their units: a slip of a unit or an exponent is none."""

Rate = Annotated[float, Field(ge=LEAST, le=MOST)]


class Device(Record):
    """One device, with the rates of its data sheet: dense, per direction.

    Memory is in GiB (2^30 bytes), rates in GB (10^9 bytes) and TFLOPS (10^12 operations) per second.
    """

    name: str = Field("", description="what a plan calls it")
    kind: Kind = Field("gpu", description="a CPU's memory is the host's")
    memory_gib: float = Field(ge=0, lt=2**30, description="what a process can have, GiB", examples=[79.1])
    bfloat16_tflops: Rate = Field(
        description="matrix products in bfloat16, 10^12 operations per second", examples=[989.0]
    )
    float32_tflops: Rate = Field(
        description="matrix products in float32, 10^12 operations per second", examples=[67.0]
    )
    memory_gb_per_second: Rate = Field(
        description="of its own memory, 10^9 bytes per second", examples=[3350.0]
    )
    host_gb_per_second: Rate = Field(
        description="to and from host memory, each way, 10^9 bytes per second", examples=[55.0]
    )
    peer_gb_per_second: Rate = Field(
        description="to the other devices of a host, 10^9 bytes per second", examples=[450.0]
    )
    network_gb_per_second: Rate = Field(
        description="to other hosts, per device, 10^9 bytes per second", examples=[50.0]
    )
    devices_per_host: int = Field(8, ge=1, le=1024, description="devices that share a host's memory")
    source: str = Field("", description="where the numbers are from")

    @model_validator(mode="after")
    def _has_memory(self) -> Device:
        if self.kind == "gpu" and not self.memory_bytes:
            raise ValueError(
                'memory_gib = 0: must be greater than 0 on a device of kind = "gpu"; give its GiB'
            )
        return self

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def is_this_cpu(self) -> bool:
        """Whether it is the machine that plans: a CPU that says no memory of its own."""
        return self.kind == "cpu" and not self.memory_bytes

    def ranks_of_a_host(self, num_ranks: int) -> int:
        """Of so many ranks those that share a host; processes of this CPU are all on one machine."""
        return num_ranks if self.is_this_cpu else min(num_ranks, self.devices_per_host)


def devices() -> dict[str, Device]:
    """The built-in ones, by name."""
    return dict(_built_in())


def find_device(name_or_file: str) -> Device:
    """A built-in device (case does not matter), or that of a TOML file.

    Raises:
        UserError: neither, or a number of the file is missing or wrong.
    """
    known = _built_in()
    for name, device in known.items():
        if name.lower() == name_or_file.lower():
            return device
    try:
        path = Path(name_or_file).expanduser()
        is_there = path.is_file()
    except (OSError, RuntimeError):  # too long a name, or "~" of someone without a home
        is_there = False
    if not is_there:
        near = [name for name in known if name_or_file.lower() in name.lower()]
        hint = f"did you mean {' or '.join(near)}? Known are" if near else "one of"
        raise UserError(
            f"--device {name_or_file}: no such device or file; {hint} {', '.join(known)}, or a TOML with its numbers "
            "(docs/planner.md)"
        )
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name another file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML ({str(error).splitlines()[0]}); correct it") from error
    try:
        return Device.model_validate({"name": path.stem} | values)
    except ValidationError as error:
        raise UserError(f"{path}: {_complaint(error.errors()[0])}") from error


def _complaint(error: ErrorDetails) -> str:
    """What is wrong with a device's file: the number, what it is, the rule and a remedy."""
    name = str(error["loc"][0]) if error["loc"] else ""
    field = Device.model_fields.get(name)
    if field is None:
        if not name:
            return error["msg"].removeprefix("Value error, ")
        near = difflib.get_close_matches(name, Device.model_fields, 1)
        known = f"did you mean {near[0]}?" if near else f"the known ones: {', '.join(Device.model_fields)}"
        return f"{name}: unknown; {known}"
    default = [] if field.is_required() else [field.default]
    example = f"for example {name} = {json.dumps((field.examples or default)[0])}"
    if error["type"] == "missing":
        return f"{name}: missing; it is {field.description}; add it, {example}"
    value = repr(error["input"])
    shown = value if len(value) <= SHOWN else value[: SHOWN - 3] + "..."
    return f"{name} = {shown}: {_rule(error)}; it is {field.description}; {example}"


def _rule(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    bounds = {
        key: f"{context[key]:,f}".rstrip("0").rstrip(".") for key in ("ge", "le", "lt") if key in context
    }
    rules = {
        "float_type": "must be a number, without quotes",
        "int_type": "must be a whole number, without quotes",
        "string_type": "must be text, in quotes",
        "literal_error": f"must be {context.get('expected')}",
        "finite_number": "must be a finite number",
        "greater_than_equal": f"must be at least {bounds.get('ge')}",
        "less_than_equal": f"must be at most {bounds.get('le')}",
        "less_than": f"must be below {bounds.get('lt')}",
    }
    return rules.get(error["type"], error["msg"])


@cache
def _built_in() -> dict[str, Device]:
    text = (Path(__file__).parent / "devices.toml").read_text("utf-8")
    return {name: Device.model_validate({"name": name} | v) for name, v in tomllib.loads(text).items()}
