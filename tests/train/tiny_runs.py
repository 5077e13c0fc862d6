"""Whole runs of a few steps in this process: a recipe, and ways to stop it from outside."""

import json
import os
import signal

from longstrand.bench.crash import write_inputs
from longstrand.config import load_recipe
from longstrand.train import sft


def recipe_in(folder, *overrides, out="run"):
    """The recipe of the crash figure with the run in `folder/out`; random bases, 12 thousand parameters."""
    if not (folder / "recipe.toml").exists():
        write_inputs(folder, steps=5)
    return load_recipe(
        folder / "recipe.toml",
        [f"run.out={folder / out}", "evaluate.sequences=2", "train.warmup_steps=1", *overrides],
    )


def signal_at_step(monkeypatch, step, number=signal.SIGTERM):
    """This process gets the signal while the step runs."""
    plain = sft.take_step

    def take_step(*arguments, **options):
        if options["step"] == step:
            os.kill(os.getpid(), number)
        return plain(*arguments, **options)

    monkeypatch.setattr(sft, "take_step", take_step)


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())
