"""A run's weights as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from longstrand.errors import UserError
from longstrand.model import save_model
from longstrand.trained import load_trained


def export_run(run: Path, out: Path) -> Path:
    """Writes the weights of a run's newest whole checkpoint, or of one of its checkpoints, and returns `out`.

    Each tensor has the dtype that the model the run began with has for it; drawn models are float32.

    Raises:
        UserError: `run` is not a run or a checkpoint of one, or `out` exists.
        RunFailed: the disk does not take the folder.
    """
    trained = load_trained(run)
    if trained.recipe is None:
        raise UserError(f"{run}: is a Hugging Face folder already; name a run, or copy it")
    return save_model(trained.model, out)
