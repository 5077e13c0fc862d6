"""The evaluations of a training run: held-out loss by position, before and after, with its control."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from longstrand.config import Recipe
from longstrand.data import Data, DocumentPacks, open_evaluation
from longstrand.errors import UserError
from longstrand.evaluate import append_series, default_edges, evaluate_series
from longstrand.parallel import by_first, said_once
from longstrand.series import read_series
from longstrand.train.saving import Training

_log = logging.getLogger(__name__)


def evaluation_packs(recipe: Recipe, data: Data) -> dict[str, DocumentPacks]:
    """What is scored, by the prefix of its name: "" the held-out data, "control " its strangers.

    Empty where the recipe names no data that is not trained on; that is said in the log.

    Raises:
        UserError: the data cannot be read, is empty, or overlaps with what is trained on.
    """
    settings = recipe.evaluate
    part = settings.split
    if settings.sources:
        folder = Path(recipe.model.path) if recipe.model.path is not None else None
        length = settings.length or recipe.data.length
        data = open_evaluation(
            settings.sources, length, like=recipe.data, model_folder=folder, apart_from=data
        )
        part = "held_out"
    elif recipe.data.split is None:
        _log.warning("nothing is evaluated: the recipe has neither [data.split] nor evaluate.sources")
        return {}
    packs = {"": data.documents(part, length=settings.length, sequences=settings.sequences)}
    if settings.control:
        packs["control "] = data.documents(
            part, length=settings.length, sequences=settings.sequences, order="strangers"
        )
    return packs


def evaluate_once(
    run: Path,
    recipe: Recipe,
    training: Training,
    packs: dict[str, DocumentPacks],
    when: str,
    between: Callable[[], None],
) -> None:
    """Scores what evaluate.json does not hold yet for this step, with all ranks; the first one writes.

    Args:
        when: "before" or "after".
        between: called before each pass, by all ranks alike; what it raises ends the evaluation.
    """
    mesh, tile = training.mesh, recipe.memory.tile
    held = by_first(mesh.world, lambda: _held(run))
    with said_once(mesh.world, UserError):
        edges = default_edges(recipe.evaluate.length or recipe.data.length, recipe.evaluate.buckets)
    for prefix, documents in packs.items():
        name = f"{prefix}{when}"
        if (name, training.step) in held:
            continue
        _log.info("evaluating %s training: %d sequences", name, len(documents))
        own = documents.dealt(mesh.data.rank, mesh.data.size)
        series = evaluate_series(training.model, own, edges, tile, name, training.step, mesh, between)
        by_first(mesh.world, partial(append_series, run, series))
        if series["nats"] is not None:
            _log.info("%s: %.4f nats over %d targets", name, series["nats"], series["tokens"])


def _held(run: Path) -> set[tuple[str, int]]:
    return {(series["name"], series["step"]) for series in read_series(run / "evaluate.json")}
