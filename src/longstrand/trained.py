"""A trained model from wherever it stands: a run, one of its checkpoints, or a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from longstrand.config import MemorySection, ModelSection, ParallelSection, Recipe, load_recipe
from longstrand.errors import CheckFailed, UserError
from longstrand.model import Model, load_model
from longstrand.model.forms import plan_forms
from longstrand.model.given import Pass
from longstrand.model.load import Weights, open_weights, outline_model
from longstrand.model.parallelize import place_model
from longstrand.ops.native import NativeState, use_native
from longstrand.ops.padding import Tiles
from longstrand.parallel import Mesh, all_ranks, make_mesh, one_process, said_once
from longstrand.state import FOLDER, check_checkpoint, latest_checkpoint, read_tensors, require_same

_MODEL = "model."  # before the names of a checkpoint's weights
_SHIPPED = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Trained:
    """A model with what is known of its training.

    Args:
        name: what to call it, such as "step 400 of runs/demo".
        recipe: of the run it comes from; None for a Hugging Face folder.
        step: optimizer steps taken; 0 for a Hugging Face folder.
        folder: the Hugging Face folder that it is, or started from; None where its weights were drawn.
        weights: opens the numbers of a model that is only outlined, for `spread`.
    """

    model: Model
    name: str
    recipe: Recipe | None
    step: int
    folder: Path | None
    weights: Callable[[], AbstractContextManager[Weights]] | None = None

    @property
    def tile(self) -> int:
        """Tokens computed at once: as in training."""
        return self.recipe.memory.tile if self.recipe is not None else MemorySection().tile

    def beyond(self, tokens: int) -> str | None:
        """A note where so many tokens are more than the model was made for; no layer numbers positions, so it runs."""
        most = self.model.architecture.max_position_embeddings
        if tokens <= most:
            return None
        made_for = f"{self.name} was made for {most:,} tokens (max_position_embeddings)"
        return f"note: {made_for}, and is given {tokens:,}"

    def spread(self, mesh: Mesh) -> Trained:
        """Makes its model one rank's part of a mesh, with the segments and rounds of the run's recipe.

        Raises:
            UserError: on all ranks: the model cannot be spread like this, or its weights cannot be used.
        """
        sizes = ParallelSection() if self.recipe is None else self.recipe.parallel
        place_model(self.model, mesh, self.weights, sizes, self.tile)
        return self

    def require_forms(self, tokens: int) -> None:
        """Refuses to begin where an op would not run in the form that the run's `kernels.require` names.

        Args:
            tokens: of the longest document.

        Raises:
            CheckFailed: naming the first such layer and op, and why; as a training would.
        """
        model, required = self.model, "none" if self.recipe is None else self.recipe.kernels.require
        if required == "none":
            return
        weight = model.norm.weight
        of = Pass(weight.dtype, Tiles(model.spans(tokens), self.tile), device=weight.device.type)
        with said_once(model.mesh.world, CheckFailed):
            plan_forms(model.architecture, of).require(required)

    def mesh(self, context: int | None, expert: int | None) -> Mesh:
        """The mesh of the processes that torch.distributed knows; of one where it knows none.

        Args:
            context, expert: sizes of these axes; what is left of the processes is `data`. Where neither is given: as
                the run was trained, if it had as many processes.

        Raises:
            UserError: sizes that do not fit the number of processes, or none where the run says nothing about so many.
        """
        with said_once(all_ranks(), UserError):  # all were given the same
            return self._mesh(context, expert)

    def _mesh(self, context: int | None, expert: int | None) -> Mesh:
        world = all_ranks().size
        like = ParallelSection() if self.recipe is None else self.recipe.parallel
        if context is None and expert is None:
            if world == 1:
                return one_process()
            if like.world == world:
                return make_mesh(data=like.data, context=like.context, expert=like.expert)
            raise UserError(
                f"{world} processes: {self.name} was not trained with as many, so say what they share; --context "
                f"{world} shares each sequence, --expert spreads the experts"
            )
        if world % (context or 1):
            raise UserError(
                f"--context {context}: must divide the number of processes, {world}; choose a divisor"
            )
        return make_mesh(data=world // (context or 1), context=context or 1, expert=expert or 1)

    def use_settings(self) -> NativeState:
        """Threads and CPU kernels for this process: those of the run, but kernels only where a compiler is."""
        recipe = self.recipe
        if recipe is not None and recipe.run.threads is not None:
            torch.set_num_threads(recipe.run.threads)
        portable = recipe is not None and (recipe.kernels.cpu == "portable" or recipe.run.dtype == "float64")
        return use_native("portable" if portable else "auto")


def load_trained(target: Path, *, outlined: bool = False) -> Trained:
    """The newest whole checkpoint of a run, a checkpoint, or the model of a Hugging Face folder.

    Args:
        outlined: the model gets its numbers in `spread`, so that a rank never holds more than its part and a layer.

    Raises:
        UserError: the folder is none of these, the run has no whole checkpoint, or a file in it is broken.
    """
    target = Path(target)
    checkpoint = Path(os.path.abspath(target))  # its name counts, which "." has not
    if (target / "run.toml").exists():
        newest = latest_checkpoint(target)
        if newest is None:
            raise UserError(
                f"{target / FOLDER}: holds no whole checkpoint yet; train first, or name a model folder"
            )
        return _from_checkpoint(newest, target, outlined)
    if (target / "manifest.json").exists() and (checkpoint.parent.parent / "run.toml").exists():
        return _from_checkpoint(checkpoint, checkpoint.parent.parent, outlined)
    if (target / "config.json").exists():
        model = outline_model(target) if outlined else load_model(target)
        return Trained(model, str(target), None, 0, target, partial(open_weights, target, model))
    raise UserError(
        f"{target}: not a run (run.toml), a checkpoint of one (manifest.json) or a model folder (config.json)"
        if target.is_dir()
        else f"{target}: no such folder; name a run, one of its checkpoints, or a model folder"
    )


class CheckpointWeights:
    """The weights of a checkpoint's model, part by part, in one process or each rank for itself.

    Args:
        folder: a checkpoint.
        model: names, shapes and dtypes; numbers are not needed.

    Attributes:
        step: optimizer steps that it was saved after.

    Raises:
        UserError: it is not whole, or holds another model.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.step = int(check_checkpoint(folder)["step"])
        self._folder = folder
        require_same(folder, {_MODEL + name: t for name, t in model.state_dict().items()}, _MODEL)

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Reads parameters and buffers of the model by name.

        Raises:
            UserError: a number is not finite.
        """
        read_tensors(self._folder, {_MODEL + name: target.detach() for name, target in targets.items()})
        _require_finite(targets, self._folder)


def model_source(model: ModelSection) -> Path:
    """The folder or config file that a recipe's model stands for.

    Raises:
        UserError: no such file, and no shipped config of that name; a file in place of a folder, or the reverse.
    """
    if model.path is not None:
        if Path(model.path).is_file():
            raise UserError(f"model.path = {model.path}: a file, so without weights; name it in model.config")
        return Path(model.path)
    if Path(str(model.config)).is_dir():
        raise UserError(
            f"model.config = {model.config}: a folder; name it in model.path, or its config.json here"
        )
    path, shipped = Path(str(model.config)), _SHIPPED / f"{model.config}.json"
    if path.exists():
        return path
    if not shipped.exists():
        names = ", ".join(sorted(file.stem for file in _SHIPPED.glob("*.json")))
        raise UserError(
            f"model.config = {model.config}: no such file, and no shipped config; shipped are {names}"
        )
    return shipped


def _require_finite(weights: Mapping[str, Tensor], folder: Path) -> None:
    """An indexer hides it: a score that is no number selects other pools, and every log-probability stays finite.

    Raises:
        UserError: naming the first weight that is not finite.
    """
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            bad = int((~torch.isfinite(weight)).sum())
            raise UserError(
                f"{folder}: {bad:,} of {weight.numel():,} values of {name} are not finite; take another checkpoint, or "
                "save the model again"
            )


def _from_checkpoint(checkpoint: Path, run: Path, outlined: bool) -> Trained:
    recipe = load_recipe(run / "run.toml")
    source = model_source(recipe.model)
    dtype = getattr(torch, recipe.run.dtype)
    if outlined:
        model = outline_model(source, dtype)
    else:
        model = load_model(source, dtype, seed=recipe.run.seed, init=recipe.model.init)
    weights = CheckpointWeights(checkpoint, model)
    if not outlined:
        weights.fill(model.state_dict())
    name, folder = f"step {weights.step:,} of {run}", source if source.is_dir() else None
    return Trained(model, name, recipe, weights.step, folder, lambda: nullcontext(weights))
