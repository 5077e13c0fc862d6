"""The mesh: which ranks share which axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from longstrand.errors import UserError
from longstrand.parallel.axis import Axis
from longstrand.parallel.processes import MEETING_SECONDS
from longstrand.plan.rules import require_divisor_of_ranks


@dataclass(frozen=True)
class Mesh:
    """The axes of a run.

    Rank r stands at r // context of `data` and r % context of `context`. `expert` is another view of the same ranks:
    groups of consecutive ones, each of which holds all experts once.

    Attributes:
        world: all ranks; gradients and token counts are summed over it.
        expert_replicas: the ranks that hold the same experts.
        devices: data x context as torch knows it, for FSDP; None for one process.
        expert_devices: replicas x expert, likewise.
    """

    data: Axis
    context: Axis
    expert: Axis
    expert_replicas: Axis
    world: Axis
    devices: DeviceMesh | None = None
    expert_devices: DeviceMesh | None = None
    _views: dict[tuple[str, str], DeviceMesh] = field(default_factory=dict, compare=False, repr=False)

    @property
    def first(self) -> bool:
        """Whether this process speaks for all: writes files, prints."""
        return self.world.rank == 0

    def view(self, name: Literal["world", "expert"], device: str) -> DeviceMesh:
        """The ranks in the order in which rows are cut for them, made once; the same calls on all ranks.

        `world`: all of them. `expert` x `expert_replicas`: those with the first experts come first.
        """
        if (name, device) not in self._views:
            ranks = torch.arange(self.world.size)
            self._views[name, device] = (
                _groups(device, ranks, ("world",))
                if name == "world"
                else _groups(device, ranks.view(-1, self.expert.size).T, ("expert", "expert_replicas"))
            )
        return self._views[name, device]


def one_process() -> Mesh:
    """A mesh of one rank."""
    return Mesh(Axis("data"), Axis("context"), Axis("expert"), Axis("expert_replicas"), Axis("world"))


def all_ranks() -> Axis:
    """The processes that torch.distributed knows; this one alone where it knows none."""
    return Axis("world", dist.group.WORLD if dist.is_initialized() else None)


def make_mesh(*, data: int, context: int, expert: int, device: str = "cpu") -> Mesh:
    """The mesh of the processes that torch.distributed knows; of one process where it knows none.

    Raises:
        UserError: the sizes do not fit the number of processes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if data * context != world:
        raise UserError(
            f"parallel.data x parallel.context = {data} x {context}: must be the number of processes, {world}; "
            f"start {data * context} processes, or change the axes"
        )
    require_divisor_of_ranks(expert, world)
    if world == 1:
        return one_process()
    ranks = torch.arange(world)
    devices = _groups(device, ranks.view(data, context), ("data", "context"))
    experts = _groups(device, ranks.view(-1, expert), ("expert_replicas", "expert"))
    return Mesh(
        data=Axis("data", devices.get_group("data")),
        context=Axis("context", devices.get_group("context")),
        expert=Axis("expert", experts.get_group("expert")),
        expert_replicas=Axis("expert_replicas", experts.get_group("expert_replicas")),
        world=Axis("world", dist.group.WORLD),
        devices=devices,
        expert_devices=experts,
    )


def _groups(device: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """Ranks by axis; their exchanges wait as long as those of all ranks, and not torch's 30 minutes (10 with NCCL)."""
    mesh = DeviceMesh(device, ranks, mesh_dim_names=names)
    for name in names if dist.get_backend() != "fake" else ():
        _set_pg_timeout(timedelta(seconds=MEETING_SECONDS), mesh.get_group(name))
    return mesh
