"""The streams of a pass: how many it has at once, and where its levers put them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.memory.host import CudaCopies, HostSlots, host_block
from longstrand.memory.levers import Levers, streams_at_once
from longstrand.memory.protocol import ScanLayer
from longstrand.memory.slots import Demand, SlottedStreams
from longstrand.memory.spool import Spool
from longstrand.memory.streams import DeviceStreams, Streams
from longstrand.plan.rules import refuse_the_same_memory


def pass_demand(
    embedding: Float[Tensor, "W D"],
    layers: Sequence[ScanLayer],
    segments: Sequence[int],
    levers: Levers,
    *,
    hc_mult: int,
    keeps_mean: bool,
    shared: bool = False,
) -> Demand:
    """The streams that a pass has at once: layer inputs of R x D values per token, and the last mean of D.

    Args:
        segments: tokens of each segment of this rank.
        shared: with context ranks a layer goes back in two stages, so that the last one needs a stream for what lies
            between them; the others have that of the gradient from above.
    """
    width, first = embedding.shape[1], first_trained(embedding, layers)
    at_once = streams_at_once(len(layers), first, levers.keep_every)
    rows: dict[tuple[int, ...], int] = {(hc_mult, width): at_once + shared}
    if keeps_mean:
        rows[(width,)] = 1
    return Demand(sum(segments), levers.tile, embedding.dtype, rows, tuple(segments))


def first_trained(embedding: Tensor, layers: Sequence[ScanLayer]) -> int:
    """The lowest layer with something to train, at which the walk back ends; their number where none has."""
    if embedding.requires_grad:
        return 0
    return next((index for index, layer in enumerate(layers) if layer.trains()), len(layers))


def open_streams(levers: Levers, demand: Demand, like: Tensor) -> Streams:
    """Streams on the device of `like`, in host memory or in a file.

    Raises:
        UserError: the device's memory is the host's.
        RunFailed: the spool cannot be made, or the host memory not be pinned.
    """
    if levers.offload == "disk":
        assert levers.spool is not None
        return SlottedStreams(Spool(Path(levers.spool), demand.num_bytes, like.device), demand)
    if levers.offload == "host":
        require_other_memory("offload", like.device)
        block = host_block(demand.num_bytes)
        return SlottedStreams(HostSlots(block, CudaCopies(block, like.device)), demand)
    return DeviceStreams(demand.num_tokens, like)


def require_other_memory(setting: str, device: torch.device) -> None:
    """Refuses a lever that moves things to the host where they already are.

    Raises:
        UserError: naming the setting of `[memory]`.
    """
    if device.type == "cpu":
        refuse_the_same_memory(setting)
