"""The memory levers of a run, refused at the start where they would have no effect or no room."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from longstrand.config import Recipe
from longstrand.errors import UserError
from longstrand.memory import levers_of
from longstrand.memory.levers import streams_at_once
from longstrand.memory.spool import Spool, remove_stale_spools, require_room
from longstrand.memory.store import first_trained, require_other_memory
from longstrand.model import Model

_log = logging.getLogger(__name__)


def check_levers(recipe: Recipe, model: Model) -> None:
    """Judges `[memory]` of a resolved recipe by a model whose frozen parameters are marked; says what a spool takes.

    Raises:
        UserError: a lever that cannot apply.
        RunFailed: the spool of the longest sequence cannot be made, or has no room.
    """
    settings, weight = recipe.memory, model.embed_tokens.weight
    for name, value in (("offload", settings.offload), ("optimizer", settings.optimizer)):
        if value == "host":
            require_other_memory(name, weight.device)
    layers = list(model.layers)
    first = first_trained(weight, layers)  # type: ignore[arg-type]
    require_fewer_streams(settings.keep_every, len(layers), first)
    levers = levers_of(settings, recipe.run.out)
    if levers.spool is not None:
        num_bytes = model.stream_bytes(recipe.data.length, levers)
        _try_spool(Path(levers.spool), num_bytes, weight.device)
        _log.info("a pass writes up to %.1f MB to its spool in %s", num_bytes / 1e6, levers.spool)


@contextmanager
def clean_spool(recipe: Recipe) -> Iterator[None]:
    """Removes what a killed run left where this run's spool will be; leaves no empty folder in that of the run."""
    spool = levers_of(recipe.memory, recipe.run.out).spool
    if spool is not None:
        remove_stale_spools(Path(spool))
    try:
        yield
    finally:
        if spool is not None and recipe.memory.spool is None:
            with suppress(OSError):  # never made, or a spool is still open and goes with the process
                Path(spool).rmdir()


def _try_spool(folder: Path, num_bytes: int, device: torch.device) -> None:
    """Makes and removes a spool as a step will: in the folder, or where the folder will be made."""
    require_room(folder, num_bytes)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    Spool(there, num_bytes, device).close()


def require_fewer_streams(keep_every: int, num_layers: int, first: int) -> None:
    """Recomputing layers must save something: going back, a group holds keep_every - 1 inputs of its own."""
    if keep_every == 1:
        return
    most = {k: streams_at_once(num_layers, first, k) for k in range(1, num_layers + 1)}
    if keep_every > num_layers:
        problem = f"this model has {num_layers} layers"
    elif most[keep_every] >= most[1]:
        problem = f"a pass then has {most[keep_every]} streams at once, and {most[1]} without it"
    else:
        return
    best = min(most, key=lambda k: most[k])
    remedy = f"set it to {best} ({most[best]} streams)" if best > 1 else "remove it"
    raise UserError(f"memory.keep_every = {keep_every}: {problem}; {remedy}")
