"""One training step of a recipe's model, watched: on this process or on ranks that meet for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from longstrand.checks.sample import Packs, packs_of
from longstrand.checks.watching import Found, Seen, WatchedOptimizer, Watcher, put_together
from longstrand.config import ParallelSection, Recipe
from longstrand.memory import Levers
from longstrand.model import Model
from longstrand.model.load import open_weights, outline_model
from longstrand.model.parallelize import place_model
from longstrand.parallel import Mesh, make_mesh, one_process, run_ranks
from longstrand.train.optimizer import freeze_all_but, trained_names
from longstrand.train.step import take_step
from longstrand.trained import model_source

Start = Literal["spawn", "fork"]
Dtype = Literal["float32", "bfloat16", "float64"]
ONE_PROCESS = ParallelSection()


@dataclass(frozen=True)
class Job:
    """A step to compute.

    Attributes:
        recipe: resolved; its model, and what of it learns and how.
        packs: of the step.
        axes: sizes and settings; of one process by default.
    """

    recipe: Recipe
    packs: Packs
    levers: Levers
    axes: ParallelSection = ONE_PROCESS
    dtype: Dtype = "float64"


def compute(job: Job, start: Start = "spawn") -> Found:
    """The step on as many processes as the job's axes ask for."""
    if job.axes.world == 1:
        return put_together([see(job)])
    return put_together(run_ranks(job.axes.world, see, job, start=start))


def see(job: Job) -> Seen:
    """This rank's part; to be called on all of them."""
    torch.set_num_threads(threads_of_each(job.recipe, job.axes))
    model, optimizer = open_model(job)
    packs = packs_of(job.packs)
    settings = job.recipe.train.model_copy(update={"clip": None})  # gradients as they are
    with Watcher(model, packs) as watcher:
        result = take_step(model, packs, optimizer, settings, step=1, levers=job.levers)
    seen = watcher.seen
    numbers = {"loss": result.loss, "norm": result.grad_norm, "indexer's loss": result.indexer_kl}
    seen.values = {name: value for name, value in numbers.items() if value is not None}
    seen.parameters = optimizer.whole if optimizer.mesh.first else {}
    return seen


def open_model(job: Job) -> tuple[Model, WatchedOptimizer]:
    """The recipe's model as one rank's part of the job's mesh, and its optimizer; without data."""
    recipe, mesh = job.recipe, mesh_of(job.axes)
    torch.manual_seed(recipe.run.seed)
    dtype = getattr(torch, job.dtype)
    source = model_source(recipe.model)
    model = outline_model(source, dtype)
    names = trained_names(model.groups(), recipe.train)
    freeze_all_but(model, names)
    weights = partial(open_weights, source, model, recipe.run.seed, recipe.model.init)
    place_model(model, mesh, weights, job.axes, job.levers.tile)
    return model, WatchedOptimizer(model, names, recipe.train, mesh=mesh)


def threads_of_each(recipe: Recipe, axes: ParallelSection) -> int:
    """Of the recipe's CPU threads, which its ranks share here."""
    return max(1, (recipe.run.threads or torch.get_num_threads()) // axes.world)


def mesh_of(axes: ParallelSection) -> Mesh:
    """This process's place among the ranks that were started for them."""
    if axes.world == 1:
        return one_process()
    return make_mesh(data=axes.data, context=axes.context, expert=axes.expert)
