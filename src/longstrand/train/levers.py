"""The memory levers of a run, refused at the start where they would have no effect or no room."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longstrand.config import Recipe
from longstrand.memory import levers_of
from longstrand.memory.spool import Spool, existing, remove_stale_spools, require_room
from longstrand.memory.store import first_trained, require_other_memory
from longstrand.model import Model
from longstrand.parallel import from_all, together
from longstrand.plan.devices import find_device
from longstrand.plan.host import check_host
from longstrand.plan.room import Room
from longstrand.plan.rules import require_fewer_streams
from longstrand.train.planning import job_of

_log = logging.getLogger(__name__)


def check_levers(recipe: Recipe, model: Model) -> None:
    """Judges `[memory]` of a resolved recipe by a model whose frozen parameters are marked; waits for no other rank.

    Raises:
        UserError: a lever that cannot apply.
    """
    settings, weight = recipe.memory, model.embed_tokens.weight
    for name, value in (("offload", settings.offload), ("optimizer", settings.optimizer)):
        if value == "host":
            require_other_memory(name, weight.device)
    layers = list(model.layers)
    first = first_trained(weight, layers)  # type: ignore[arg-type]
    require_fewer_streams(settings.keep_every, len(layers), first)


def check_spool(recipe: Recipe, model: Model) -> None:
    """Judges the spools of a step by a model that is spread; every rank calls it, and it ends alike on all.

    Each rank writes a file of its own, of its segments of one document of the full length: those on one disk need room
    together.

    Raises:
        RunFailed: they cannot be made, or have no room.
    """
    levers, world = levers_of(recipe.memory, recipe.run.out), model.mesh.world
    if levers.spool is None:
        return
    folder = Path(levers.spool)
    num_bytes = model.stream_demand(recipe.data.length, levers).num_bytes
    with together(world):
        there = existing(folder)
        disk = (platform.node(), there.stat().st_dev)
    here = [each for at, each in from_all(world, (disk, num_bytes)) if at == disk]
    with together(world):
        require_room(folder, sum(here), num_ranks=len(here))
    with together(world):  # all have looked: from here on the trials take room themselves
        Spool(there, num_bytes, model.embed_tokens.weight.device).close()
    _log.info("a pass writes up to %.1f MB to its spool in %s", num_bytes / 1e6, levers.spool)


def check_machine(recipe: Recipe, model: Model) -> None:
    """Judges what the planner says that this host's ranks take: memory, open files, address space, a file's size.

    Every rank calls it, and it ends alike on all. Only what clearly cannot be is refused; `longstrand plan` says more.

    Raises:
        UserError: each shortage with its numbers.
    """
    world, node = model.mesh.world, platform.node()
    here = from_all(world, node).count(node)
    job = job_of(recipe, model.architecture, model.embed_tokens.weight.device)
    host = find_device("CPU").model_copy(update={"kind": job.kind, "devices_per_host": here})
    with together(world):
        check_host(job, Room(host, here), num_sources=len(recipe.data.sources))


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
