"""A sharded tensor and the rows of it that this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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
