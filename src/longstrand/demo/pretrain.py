"""How the shipped checkpoint was trained: stages of generated sequences, each from the weights of the one before.

    python -m longstrand.demo.pretrain --out runs/checkpoint

Called again on the same folder it goes on where it was stopped; the last stage's weights stand in OUT/checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from longstrand.config import Recipe
from longstrand.demo.kin import Kin, generate
from longstrand.errors import UserError
from longstrand.export import export_run
from longstrand.train.run_folder import holds_run
from longstrand.train.sft import train

SHIPPED = Path(str(resources.files("longstrand"))) / "demo_data"
CURRICULUM = Path(str(resources.files("longstrand"))) / "recipes" / "pretrain" / "curriculum.toml"
CONFIG = CURRICULUM.parent / "model.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """One stage of the curriculum: what its sequences look like, and the settings of its training."""

    name: str
    kin: Kin
    train: dict[str, Any]
    pack: int  # tokens of a pack of sequences
    sequences: int  # generated; each is shown at most once
    seed: int


def stages() -> list[Stage]:
    """The curriculum as shipped."""
    read = tomllib.loads(CURRICULUM.read_text("utf-8"))
    return [
        Stage(
            name=f"{number}_{entry['name']}",
            kin=_kin(entry["kin"]),
            train=entry["train"],
            pack=entry["pack"],
            sequences=entry["sequences"],
            seed=entry["seed"],
        )
        for number, entry in enumerate(read["stage"], start=1)
    ]


def recipe_of(stage: Stage, out: Path, before: Path | None) -> Recipe:
    """The recipe of one stage.

    Args:
        out: folder of all stages.
        before: weights to start from; None draws them.
    """
    model = {"config": str(CONFIG)} if before is None else {"path": str(before)}
    return Recipe.model_validate(
        {
            "run": {"out": str(out / stage.name / "run"), "seed": stage.seed, "threads": 1},
            "model": model,
            "data": {
                "sources": [{"path": str(out / stage.name / "sequences.fa")}],
                "length": stage.pack,
                "cache": str(out / "cache"),
            },
            "train": stage.train,
            "evaluate": {"before": False},
        }
    )


def write_sequences(stage: Stage, path: Path) -> Path:
    """Writes the stage's sequences as FASTA; a file that is there is whole and stays."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        for number in range(stage.sequences):
            letters, _ = generate(stage.kin, stage.seed, number)
            file.write(b">%s_%d\n%s\n" % (stage.name.encode(), number, letters.astype(np.uint8).tobytes()))
    unfinished.rename(path)
    return path


def pretrain(out: Path) -> Path:
    """Trains all stages and returns the folder of the last one's weights.

    Raises:
        UserError, RunFailed, CheckFailed, Stopped: as `train`.
    """
    before: Path | None = None
    for stage in stages():
        weights = out / stage.name / "weights"
        if not weights.exists():
            _log.info("stage %s: %d sequences", stage.name, stage.sequences)
            write_sequences(stage, out / stage.name / "sequences.fa")
            recipe = recipe_of(stage, out, before)
            export_run(train(recipe, resume=holds_run(recipe)), weights)
        before = weights
    if before is None:
        raise UserError(f"{CURRICULUM}: has no stage")
    final = out / "checkpoint"
    shutil.rmtree(final, ignore_errors=True)
    shutil.copytree(before, final)
    return final


def _kin(entry: dict[str, Any]) -> Kin:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
    }
    return Kin(**values)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/checkpoint"))
    logging.basicConfig(level=logging.INFO)
    print(pretrain(parser.parse_args().out))  # noqa: T201
