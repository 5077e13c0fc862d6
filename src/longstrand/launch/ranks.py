"""What every rank does, however it was started: make the mesh, then train."""

from __future__ import annotations

from pathlib import Path

import torch

from longstrand.config import Recipe
from longstrand.parallel import Axis, make_mesh, together
from longstrand.train.sft import train


def train_as_rank(recipe: Recipe, world: Axis, *, resume: bool) -> Path:
    """Trains as one of the ranks that torch.distributed knows; returns the run's folder.

    Raises:
        LongstrandError: what ends the run, on every rank.
    """
    sizes = recipe.parallel
    with together(world):
        mesh = make_mesh(data=sizes.data, context=sizes.context, expert=sizes.expert)
    return train(recipe, resume=resume, mesh=mesh)


def backend() -> str:
    """Gloo for tensors in host memory, NCCL for those on a GPU."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
