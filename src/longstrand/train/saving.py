"""What a run must keep to go on as if it had never stopped, and how it is put back."""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longstrand.atomic import write_atomic
from longstrand.data import Data, Loader
from longstrand.errors import UserError
from longstrand.model import Model
from longstrand.parallel import Mesh, as_stored, by_first, local_part, said_once
from longstrand.state import (
    FOLDER,
    has_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    remove_unfinished,
    save_checkpoint,
    set_broken_aside,
)
from longstrand.train.metrics import cut_after
from longstrand.train.optimizer import Optimizer

_log = logging.getLogger(__name__)


@dataclass
class Training:
    """All that moves while a run goes on."""

    model: Model
    optimizer: Optimizer
    data: Data
    loader: Loader
    step: int = 0

    @property
    def mesh(self) -> Mesh:
        """The ranks that share the run."""
        return self.optimizer.mesh

    def tensors(self) -> dict[str, Tensor]:
        """Model and optimizer as a checkpoint names them, the same for any number of ranks; not copies."""
        mesh = self.mesh
        model = {
            f"model.{name}": as_stored(local_part(tensor), tensor, mesh)
            for name, tensor in self.model.state_dict().items()
        }
        return model | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.tensors().items()}


def save(run: Path, training: Training, keep: int) -> Path:
    """Writes a checkpoint, then deletes all but the newest `keep`, then the ledger; returns the new folder.

    All ranks call it; the loader and the random state that are kept are those of the first one.
    """
    world = training.mesh.world
    trainer = {
        "updates": training.optimizer.updates,
        "loader": training.loader.state_dict(),
        "random": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    folder = save_checkpoint(run, training.step, training.tensors(), trainer, world)

    def finish() -> None:
        prune_checkpoints(run, keep)
        write_ledger(run, training)

    by_first(world, finish)
    return folder


def write_ledger(run: Path, training: Training) -> None:
    """Writes data.json: what the data is, and what of it was shown up to this step."""
    write_atomic(run / "data.json", json.dumps(training.data.ledger.as_dict(), indent=1))


def restore(run: Path, training: Training, steps: int, *, resume: bool = False) -> None:
    """Goes back to the newest whole checkpoint, if there is one, and cuts the metrics after it.

    All ranks call it; the first one says which checkpoint that is, and cuts.

    Args:
        resume: whether one is looked for, so that there being none is said.

    Raises:
        UserError: no checkpoint is whole, it is beyond `steps`, or it belongs to another recipe or other data.
    """
    world = training.mesh.world
    newest = by_first(world, lambda: _reopen(run))
    if newest is not None:
        trainer = load_checkpoint(newest, training.tensors(), world=world)
        training.step = trainer["step"]
        with said_once(world, UserError):
            _require_steps(steps, training.step)
        training.optimizer.continue_from(trainer["updates"])
        training.loader.load_state_dict(trainer["loader"])
        torch.set_rng_state(
            torch.frombuffer(bytearray(base64.b64decode(trainer["random"])), dtype=torch.uint8)
        )
    cut, absent = by_first(world, lambda: cut_after(run, training.step))
    if absent:
        _log.warning("metrics.jsonl lacks %d of the %d lines up to here", absent, training.step)
    if not training.mesh.first:
        return
    if newest is not None:
        _log.info("going on from %s; %d lines of metrics.jsonl after it were cut", newest.name, cut)
    elif resume:
        then = f"; {cut} lines of metrics.jsonl were cut" if cut else ""
        say_nothing_to_resume(run, f"it begins at step 0{then}")


def say_nothing_to_resume(run: Path, then: str) -> None:
    """Warns that `--resume` finds nothing, as where a scheduler's command is run for the first time."""
    _log.warning("--resume: run.out = %s holds no checkpoint to go on from: %s", run, then)


def _require_steps(steps: int, taken: int) -> None:
    if taken > steps:
        raise UserError(
            f"train.steps = {steps}: the newest checkpoint is of step {taken}; set train.steps to {taken} or more"
        )


def _reopen(run: Path) -> Path | None:
    """Tidies the folder of checkpoints and returns the newest whole one; no newer one is left beside it."""
    if stale := remove_unfinished(run):
        _log.warning("removed %d unfinished checkpoint folders that a killed run left", stale)
    newest = latest_checkpoint(run)
    if newest is None and has_checkpoint(run):
        raise UserError(
            f"{run / FOLDER}: none of its checkpoints is whole; restore one, or remove them all to begin at step 0"
        )
    if newest is not None:
        set_broken_aside(run, newest)
    return newest
