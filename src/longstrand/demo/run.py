"""The demo: a small shipped model learns to use relatives that stand thousands of letters back."""

from __future__ import annotations

from pathlib import Path

from longstrand.config import Recipe, load_recipe
from longstrand.demo.pretrain import SHIPPED
from longstrand.report import write_report
from longstrand.train.run_folder import holds_run
from longstrand.train.sft import train


def run_demo(out: Path, seeds: int = 1) -> Path:
    """Fine-tunes the shipped checkpoint, scores families it has not seen, and returns the report's path.

    Natural sequences in a constructed order: each sequence holds alleles of a few resistance-gene families. A gain
    that grows with position is copying of relatives; with strangers in their place (the control) it must go.

    Args:
        out: the run's folder; with several seeds, one folder in it per seed (`seed_0`, ...). A demo that was stopped
            is gone on with.
        seeds: how often it is repeated; a seed changes the order of the training sequences only.

    Returns:
        report.html of the first seed.
    """
    folders = demo_folders(Path(out), seeds)
    recipes = [demo_recipe(folder, seed) for seed, folder in enumerate(folders)]
    reports = [write_report(train(recipe, resume=holds_run(recipe))) for recipe in recipes]
    return reports[0]


def demo_folders(out: Path, seeds: int) -> list[Path]:
    """The run folder of each seed."""
    return [out] if seeds == 1 else [out / f"seed_{seed}" for seed in range(seeds)]


def demo_recipe(out: Path, seed: int) -> Recipe:
    """The shipped recipe `demo` with its model, its genes and its folder in place."""
    recipe = load_recipe("demo")
    genes = recipe.data.sources[0].model_copy(update={"path": str(SHIPPED / "resfinder_alleles.fa.gz")})
    return recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update={"out": str(out), "seed": seed}),
            "model": recipe.model.model_copy(update={"path": str(SHIPPED / "checkpoint")}),
            "data": recipe.data.model_copy(update={"sources": [genes], "cache": str(out / ".cache")}),
        }
    )
