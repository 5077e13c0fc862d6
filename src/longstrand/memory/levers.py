"""The memory levers of a pass as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longstrand.config import MemorySection
from longstrand.plan.streams import kept_inputs as kept_inputs
from longstrand.plan.streams import streams_at_once as streams_at_once

Offload = Literal["none", "host", "disk"]


@dataclass(frozen=True)
class Levers:
    """What bounds the memory of a pass; none of them changes its results.

    Attributes:
        tile: tokens computed at once.
        keep_every: inputs are kept of the layers 0, k, 2k, ...; those between are recomputed from them.
        offload: where streams (layer inputs, last mean, running gradient) live: the device, the host, a file.
        spool: folder of the file for `offload = "disk"`.
        recompute: False keeps each tile's activations from forward to backward, and recomputes nothing.
        keep_fronts: where ranks share a pack, a layer goes over its tiles twice each way: True keeps what the second
            time needs of the first, of one layer at a time, in place of computing it again.

    Raises:
        ValueError: a value outside its rule.
    """

    tile: int = 1024
    keep_every: int = 1
    offload: Offload = "none"
    spool: str | None = None
    recompute: bool = True
    keep_fronts: bool = False

    def __post_init__(self) -> None:
        if self.tile < 1:
            raise ValueError(f"tile must be at least 1 token, got {self.tile}")
        if self.keep_every < 1:
            raise ValueError(f"keep_every must be at least 1 layer, got {self.keep_every}")
        if self.offload not in ("none", "host", "disk"):
            raise ValueError(f'offload must be "none", "host" or "disk", got {self.offload!r}')
        if (self.offload == "disk") != (self.spool is not None):
            raise ValueError('spool is the folder of offload = "disk": give both or none')
        if not self.recompute and (self.keep_every > 1 or self.offload != "none"):
            raise ValueError(
                "recompute = False keeps all activations: keep_every and offload would save nothing"
            )


def levers_of(settings: MemorySection, run: str | Path) -> Levers:
    """The levers that a recipe asks for; the spool of a run is in its folder unless the recipe says where."""
    spool = settings.spool or str(Path(run) / "spool")
    return Levers(
        settings.tile,
        settings.keep_every,
        settings.offload,
        spool if settings.offload == "disk" else None,
        settings.recompute,
        settings.keep_fronts,
    )
