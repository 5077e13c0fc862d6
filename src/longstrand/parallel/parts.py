"""A sharded tensor and the rows of it that this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from longstrand.parallel.mesh import Mesh


def local_part(tensor: Tensor) -> Tensor:
    """The rows of this rank of a sharded tensor, in the same memory; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def like_sharded(values: Tensor, parameter: Tensor) -> Tensor:
    """This rank's rows as a tensor that is sharded as the parameter is; the rows themselves where it is not."""
    if not isinstance(parameter, DTensor):
        return values
    return DTensor.from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def as_stored(values: Tensor, parameter: Tensor, mesh: Mesh) -> Tensor:
    """This rank's rows as a checkpoint sees them: with all experts in one tensor, on the device of the rows.

    Args:
        values: not a copy; a checkpoint is loaded into them.
        parameter: the one they belong to; the rows themselves are returned where it is not sharded.
    """
    if not isinstance(parameter, DTensor):
        return values
    spread = parameter.device_mesh.mesh_dim_names == ("expert_replicas",)
    view = mesh.view("expert" if spread else "world", values.device.type)
    rows = parameter.shape[0] * (mesh.expert.size if spread else 1)
    return DTensor.from_local(
        values,
        view,
        [Shard(0)] * view.ndim,
        run_check=False,
        shape=torch.Size([rows, *parameter.shape[1:]]),
        stride=parameter.stride(),
    )
