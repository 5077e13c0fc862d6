"""What a planner knows of a device: a few numbers, built in or from a TOML of one's own."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from longstrand.config.base import Record
from longstrand.errors import UserError

GIB = 2**30


class Device(Record):
    """One device, with the rates of its data sheet: dense, per direction.

    Memory is in GiB (2^30 bytes), rates in GB (10^9 bytes) and TFLOPS (10^12 operations) per second.
    """

    name: str = Field("", description="what a plan calls it")
    kind: Literal["gpu", "cpu"] = Field("gpu", description="a CPU's memory is the host's")
    memory_gib: float = Field(ge=0, lt=2**30, description="what a process can have, GiB")
    bfloat16_tflops: float = Field(gt=0, description="matrix products in bfloat16")
    float32_tflops: float = Field(gt=0, description="matrix products in float32")
    memory_gb_per_second: float = Field(gt=0, description="of its own memory")
    host_gb_per_second: float = Field(gt=0, description="to and from host memory, each way")
    peer_gb_per_second: float = Field(gt=0, description="to the other devices of a host")
    network_gb_per_second: float = Field(gt=0, description="to other hosts, per device")
    devices_per_host: int = Field(8, ge=1, description="devices that share a host's memory")
    source: str = Field("", description="where the numbers are from")

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
    path = Path(name_or_file).expanduser()
    if not path.is_file():
        raise UserError(
            f"--device {name_or_file}: no such device or file; one of {', '.join(known)}, or a TOML with its numbers "
            "(docs/planner.md)"
        )
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML ({str(error).splitlines()[0]})") from error
    try:
        return Device.model_validate({"name": path.stem} | values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path}: {where} = {first.get('input')!r}: {first['msg']}") from error


@cache
def _built_in() -> dict[str, Device]:
    text = (Path(__file__).parent / "devices.toml").read_text("utf-8")
    return {name: Device.model_validate({"name": name} | v) for name, v in tomllib.loads(text).items()}
