"""Two steps without stopping against a step, a checkpoint, and a step from there: on as many ranks or on others."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from longstrand.checks.comparing import Difference, Names, exceeds, largest
from longstrand.checks.computing import Job, Start, open_model
from longstrand.checks.on_ranks import take_step_on
from longstrand.checks.sample import Packs, draw_packs, packs_of
from longstrand.checks.watching import gathered
from longstrand.data import open_data
from longstrand.parallel import run_ranks
from longstrand.train.saving import Training, restore, save
from longstrand.trained import model_source

Part = Literal["both steps", "first step", "second step"]


@dataclass(frozen=True)
class State:
    """What a run is after its second step.

    Attributes:
        tensors: of model and optimizer, whole on the first rank.
        packs: of the second step, as the loader gave them.
    """

    loss: float
    tensors: dict[str, Tensor]
    packs: Packs


@dataclass(frozen=True)
class Run:
    """A run of two steps, or a part of one.

    Attributes:
        job: whose packs are drawn anew, since the loader is a part of what is resumed.
        folder: of the checkpoint.
        tokens, count: of each step, see `draw_packs`.
    """

    job: Job
    folder: str
    tokens: int
    count: int

    def go(self, part: Part, start: Start) -> State:
        """The part, on as many processes as the job's axes ask for."""
        if self.job.axes.world == 1:
            return _go(self, part)
        states: list[State] = run_ranks(self.job.axes.world, _go, self, part, start=start)
        return states[0]

    def on(self, job: Job) -> Run:
        return replace(self, job=job)


def compare_states(found: State, truth: State, names: Names, limit: float) -> Difference:
    """How far a resumed run is from one that never stopped, after the same steps."""
    value, where = largest(found.tensors, truth.tensors)
    loss = abs(found.loss - truth.loss) / abs(truth.loss) if found.loss != truth.loss else 0.0
    place: str | None = None
    if found.packs != truth.packs:
        place = "the data of the second step"
    elif exceeds(loss, limit):
        place = "the loss of the second step"
    elif exceeds(value, limit):
        place = f"after the second step, {where}"
    return Difference(loss, None, value, _group(where, names), place)


def _go(run: Run, part: Part) -> State:
    """On every rank of the job's mesh."""
    training, folder = _open(run.job), Path(run.folder)
    loss, packs = math.nan, ()
    if part == "second step":
        restore(folder, training, steps=2)
    while training.step < (1 if part == "first step" else 2):
        packs = draw_packs(training.loader, run.tokens, run.count)
        training.step += 1
        result = take_step_on(
            training.model,
            packs_of(packs),
            training.optimizer,
            run.job.recipe.train,
            step=training.step,
            levers=run.job.levers,
        )
        loss = math.nan if result.loss is None else result.loss
    if part == "first step":
        save(folder, training, keep=1)
        if training.optimizer.mesh.first:
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    return State(loss, _whole_tensors(training), packs)


def _open(job: Job) -> Training:
    """As `train` opens a recipe, on the job's mesh."""
    recipe = job.recipe
    source = model_source(recipe.model)
    data = open_data(recipe.data, seed=recipe.run.seed, model_folder=source if source.is_dir() else None)
    model, optimizer = open_model(job)
    return Training(model, optimizer, data, data.train_loader(recipe.train.sequences_per_step))


def _whole_tensors(training: Training) -> dict[str, Tensor]:
    mesh = training.optimizer.mesh
    return {name: gathered(tensor.detach(), mesh).clone() for name, tensor in training.tensors().items()}


def _group(tensor: str, names: Names) -> str:
    """The group of a parameter, or of its moments, by its name in a checkpoint; a buffer's last name."""
    parameter = tensor.removeprefix("model.").removeprefix("optimizer.")
    for moment in ("exp_avg.", "exp_avg_sq.", "master."):
        parameter = parameter.removeprefix(moment)
    return names.groups.get(parameter, parameter.rpartition(".")[2])
