"""The streams of a pass: how many it has at once, and where its levers put them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from longstrand.errors import UserError
from longstrand.memory.host import HostSlots
from longstrand.memory.levers import Levers, streams_at_once
from longstrand.memory.slots import Demand, SlottedStreams
from longstrand.memory.spool import Spool
from longstrand.memory.streams import DeviceStreams, Streams


def pass_demand(
    like: Tensor,
    num_tokens: int,
    levers: Levers,
    *,
    num_layers: int,
    streams: int,
    first: int,
    keeps_mean: bool,
) -> Demand:
    """The streams that a pass has at once: layer inputs of R x D values per token, and the last mean of D.

    Args:
        like: the embedding [W, D].
        first: the lowest layer that trains; `num_layers` where only the end does.
    """
    width = like.shape[1]
    rows: dict[tuple[int, ...], int] = {
        (streams, width): streams_at_once(num_layers, first, levers.keep_every)
    }
    if keeps_mean:
        rows[(width,)] = 1
    return Demand(num_tokens, levers.tile, like.dtype, rows)


def open_streams(levers: Levers, demand: Demand, like: Tensor) -> Streams:
    """Streams on the device of `like`, in host memory or in a file.

    Raises:
        UserError: the device's memory is the host's.
        RunFailed: the spool cannot be made.
    """
    if levers.offload == "disk":
        assert levers.spool is not None
        return SlottedStreams(Spool(Path(levers.spool), demand.num_bytes, like.device), demand)
    if levers.offload == "host":
        require_other_memory("offload", like.device)
        return SlottedStreams(HostSlots(demand.num_bytes, like.device), demand)
    return DeviceStreams(demand.num_tokens, like)


def require_other_memory(setting: str, device: torch.device) -> None:
    """Refuses a lever that moves things to the host where they already are.

    Raises:
        UserError: naming the setting of `[memory]`.
    """
    if device.type == "cpu":
        remedies = {"offload": '"disk" or "none"', "optimizer": '"device"'}
        raise UserError(
            f'memory.{setting} = "host": the model is on the CPU, whose memory is the host\'s: nothing would leave '
            f"it; set {remedies[setting]}"
        )
