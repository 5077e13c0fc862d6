"""Two steps without stopping against a step, a checkpoint, and a step from there: on as many ranks or on others."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from longstrand.checks.comparing import Difference, Names, exceeds, largest
from longstrand.checks.computing import Start, mesh_of, threads_of_each
from longstrand.checks.sample import Packs, draw_packs, packs_of
from longstrand.checks.watching import gathered
from longstrand.config import ParallelSection, Recipe
from longstrand.memory import levers_of
from longstrand.parallel import run_ranks
from longstrand.train.saving import Training, restore, save
from longstrand.train.sft import prepare, spread
from longstrand.train.step import take_step

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
    """A run of two steps, or a part of one, as `train` takes them but for the number of tokens.

    Attributes:
        recipe: resolved, in float64.
        folder: of the checkpoint.
        tokens, count: of each step, see `draw_packs`.
    """

    recipe: Recipe
    folder: str
    tokens: int
    count: int

    def go(self, part: Part, axes: ParallelSection, start: Start) -> State:
        """The part, on as many processes as the axes ask for."""
        if axes.world == 1:
            return _go(self, part, axes)
        states: list[State] = run_ranks(axes.world, _go, self, part, axes, start=start)
        return states[0]


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


def _go(run: Run, part: Part, axes: ParallelSection) -> State:
    """On every rank."""
    given = run.recipe.run.model_copy(update={"threads": threads_of_each(run.recipe, axes)})
    recipe = run.recipe.model_copy(update={"parallel": axes, "run": given})
    mesh, folder = mesh_of(axes), Path(run.folder)
    training = spread(recipe, prepare(recipe, outlined=mesh.world.size > 1), mesh)
    loss = math.nan
    packs: Packs = ()
    if part == "second step":
        restore(folder, training, steps=2)
    while training.step < (1 if part == "first step" else 2):
        packs = draw_packs(training.loader, run.tokens, run.count)
        training.step += 1
        loss = _step(training, packs, recipe, folder)
    if part == "first step":
        save(folder, training, keep=1)
        if training.mesh.first:
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    return State(loss, _whole_tensors(training), packs)


def _step(training: Training, packs: Packs, recipe: Recipe, folder: Path) -> float:
    levers = levers_of(recipe.memory, folder)
    settings, step = recipe.train, training.step
    given = packs_of(packs)
    result = take_step(training.model, given, training.optimizer, settings, step=step, levers=levers)
    return math.nan if result.loss is None else result.loss


def _whole_tensors(training: Training) -> dict[str, Tensor]:
    mesh = training.mesh
    return {name: gathered(tensor.detach(), mesh).clone() for name, tensor in training.tensors().items()}


def _group(tensor: str, names: Names) -> str:
    """The group of a parameter, or of its moments, by its name in a checkpoint; a buffer's last name."""
    parameter = tensor.removeprefix("model.").removeprefix("optimizer.")
    for moment in ("exp_avg.", "exp_avg_sq.", "master."):
        parameter = parameter.removeprefix(moment)
    return names.groups.get(parameter, parameter.rpartition(".")[2])
