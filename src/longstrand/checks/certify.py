"""`longstrand certify`: the equalities that carry training, on a recipe's own model and data."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import torch
from rich.console import Console

from longstrand.checks.certificate import WIDTH, Certificate, Check
from longstrand.checks.comparing import Difference
from longstrand.checks.computing import Start
from longstrand.checks.plan import Subject
from longstrand.checks.sample import num_tokens
from longstrand.config import ParallelSection, Recipe
from longstrand.errors import CheckFailed, UserError
from longstrand.train.run_folder import check_unused, make_folder, resolve_recipe

NAMES = ("ranks", "packs", "tiles", "levers", "resume")
TOKENS = 2048
MOST_RANKS = 16


def run_certification(
    recipe: Recipe,
    *,
    tokens: int = TOKENS,
    ranks: int | None = None,
    start: Start = "spawn",
    only: Collection[str] = NAMES,
) -> Path:
    """Certifies a recipe, shows what was found, and returns the certificate.json that it wrote into the run folder.

    Raises:
        CheckFailed: something differs, with the check and where it begins to.
    """
    run = Path(recipe.run.out).expanduser()
    certificate = certify(recipe, tokens=tokens, ranks=ranks, start=start, only=only)
    path = certificate.write(run)
    certificate.show(Console(width=WIDTH))
    if not certificate.passed:
        raise CheckFailed(f"{certificate.failure}; {path} has all of them")
    return path


def certify(
    recipe: Recipe,
    *,
    tokens: int = TOKENS,
    ranks: int | None = None,
    start: Start = "spawn",
    only: Collection[str] = NAMES,
) -> Certificate:
    """Compares, in float64, ways to compute the same step that must agree; knows of no fault in particular.

    Args:
        tokens: of all packs together.
        ranks: of the context axis, in place of the recipe's axes.
        start: how ranks begin.
        only: names of the checks to make.

    Raises:
        UserError: the recipe, its inputs, its folder or an option cannot be used.
    """
    axes = _axes(recipe, ranks)
    if tokens < 64:
        raise UserError(f"--tokens {tokens}: must be at least 64; raise it")
    check_unused(run := Path(recipe.run.out).expanduser(), resume=True)
    resolved = resolve_recipe(recipe)
    if resolved.run.threads is not None:
        torch.set_num_threads(resolved.run.threads)
    make_folder(run)
    progress = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix=".certify-", dir=run) as folder:
        subject = Subject.open(resolved, axes, tokens, folder, start)
        checks: list[Check] = []
        for planned in subject.plan():
            if planned.name not in only:
                continue
            progress.print(f"certify: {planned.name}, {planned.settings} ...", highlight=False, markup=False)
            began = time.perf_counter()
            try:
                difference = planned.measure()
            except CheckFailed as failed:  # what a step refuses, such as a loss that is not finite
                difference = Difference.refused(str(failed))
            seconds = time.perf_counter() - began
            checks.append(Check(planned.name, planned.settings, difference, planned.limit, seconds))
    return Certificate(subject.words, num_tokens(subject.packs), checks, subject.not_checked)


def _axes(recipe: Recipe, ranks: int | None) -> ParallelSection:
    """The recipe's, two context ranks where it has none, or as many context ranks as asked for."""
    given = recipe.parallel
    if ranks is not None:
        given = given.model_copy(update={"data": 1, "context": ranks, "expert": 1})
    elif given.world == 1:
        given = given.model_copy(update={"context": 2})
    if given.world > MOST_RANKS:
        asked = (
            f"parallel.data x parallel.context = {given.data} x {given.context}"
            if ranks is None
            else f"--ranks {ranks}"
        )
        raise UserError(
            f"{asked}: certify starts {MOST_RANKS} processes at most on this machine; give it fewer with --ranks"
        )
    return given
