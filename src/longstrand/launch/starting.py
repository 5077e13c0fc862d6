"""Where `longstrand train` finds out how it was started, and begins the run that way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from longstrand.config import ParallelSection, Recipe
from longstrand.errors import UserError
from longstrand.launch.local import train_on_this_machine
from longstrand.launch.ranks import backend, others_needed, train_as_rank
from longstrand.launch.through_ray import train_through_ray
from longstrand.omp_threads import flaw_of_told_threads
from longstrand.parallel import Axis, all_ranks, by_first
from longstrand.parallel.processes import MEETING_SECONDS
from longstrand.rank_process import under_torchrun
from longstrand.train.dry_run import check
from longstrand.train.run_folder import Started
from longstrand.train.sft import train


def start_training(
    load: Callable[[], Recipe],
    environment: MutableMapping[str, str],
    *,
    resume: bool = False,
    dry_run: bool = False,
    workers: int | None = None,
    ray: str | None = None,
) -> Path | None:
    """Trains as a recipe says and returns the run's folder; None on a rank that another one speaks for.

    Args:
        load: gives the recipe; where torchrun started this process, the first rank alone calls it.
        environment: torchrun's variables are read from it, and Ray's are set in it.
        workers: processes to start; None: one, under Ray as many as the recipe says.
        ray: "local" starts a Ray of its own, which ends with the run; else the address of a cluster.

    Raises:
        UserError: the recipe does not fit the number of processes, or two ways to start are asked for at once; and
            what `train` raises.
    """
    if under_torchrun(environment):
        if workers is not None or ray is not None:
            option = "--ray" if ray is not None else "--workers"
            raise UserError(
                f"{option}: torchrun has started the processes already; remove it, or start without torchrun"
            )
        if dry_run:
            return _check_under_torchrun(load, environment, resume=resume)
        with _joined(environment) as world, others_needed(world):
            return _train_under_torchrun(world, load, environment, resume=resume)
    recipe = load()
    if workers is None:
        workers = recipe.parallel.world if ray is not None else None
    if workers is not None or not dry_run:
        require_fit(recipe.parallel, workers or 1)
    started = Started(warnings=_warnings(recipe, environment))
    if dry_run:
        check(recipe, resume=resume, started=started, here=workers is not None and ray in (None, "local"))
        return Path(recipe.run.out)
    if ray is not None:
        return train_through_ray(recipe, workers or 1, ray, environment, resume=resume, started=started)
    if workers is not None and workers > 1:
        return train_on_this_machine(recipe, workers, resume=resume, started=started)
    return train(recipe, resume=resume, started=started)


@contextmanager
def joined_ranks(environment: MutableMapping[str, str]) -> Iterator[Axis]:
    """The ranks that torchrun started, else this process alone.

    A rank shows what ends it alone: only where all end for the same reason one speaks for them (`said_by_another`).
    """
    if not under_torchrun(environment):
        yield all_ranks()
        return
    with _joined(environment) as world, others_needed(world, "start again"):
        yield world


def require_fit(parallel: ParallelSection, num_processes: int) -> None:
    """Refuses a recipe for another number of processes; one for a single process is not spread by itself.

    Raises:
        UserError: with what to set, or how to start.
    """
    if parallel.world == num_processes:
        return
    if parallel == ParallelSection():
        raise UserError(
            f"{num_processes} processes for a recipe without [parallel]: it must say what they share; set "
            f"parallel.data = {num_processes} (each computes its own sequences) or parallel.context = {num_processes} "
            "(they share each sequence), or both with that product"
        )
    raise UserError(
        f"parallel.data x parallel.context = {parallel.data} x {parallel.context}: must be the number of processes, "
        f"{num_processes}; start {parallel.world} (--workers {parallel.world}, or torchrun), or change the axes"
    )


def _check_under_torchrun(
    load: Callable[[], Recipe], environment: Mapping[str, str], *, resume: bool
) -> Path | None:
    """The first process checks for all; none joins the others, since the layout is counted on pretended ranks."""
    if environment["RANK"] != "0":
        return None
    recipe = load()
    require_fit(recipe.parallel, int(environment["WORLD_SIZE"]))
    check(recipe, resume=resume, started=Started(warnings=_warnings(recipe, environment)), here=True)
    return Path(recipe.run.out)


def _train_under_torchrun(
    world: Axis, load: Callable[[], Recipe], environment: Mapping[str, str], *, resume: bool
) -> Path | None:
    recipe = by_first(world, load)
    started = Started(_torchrun(environment), warnings=_warnings(recipe, environment))
    by_first(world, lambda: require_fit(recipe.parallel, world.size))
    run = train_as_rank(recipe, world, resume=resume, started=started)
    return run if world.rank == 0 else None


def _torchrun(environment: Mapping[str, str]) -> str:
    one_machine = environment.get("LOCAL_WORLD_SIZE") == environment.get("WORLD_SIZE")
    return "--standalone --nproc-per-node {}" if one_machine else "<as before>"


def _warnings(recipe: Recipe, environment: Mapping[str, str]) -> tuple[str, ...]:
    flaw = flaw_of_told_threads(environment) if recipe.run.threads is None else None
    return (flaw,) if flaw is not None else ()


@contextmanager
def _joined(environment: MutableMapping[str, str]) -> Iterator[Axis]:
    """The ranks that torchrun started, all of them."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend(), timeout=timedelta(seconds=MEETING_SECONDS))
    try:
        yield Axis("world", dist.group.WORLD)
    finally:
        dist.destroy_process_group()
