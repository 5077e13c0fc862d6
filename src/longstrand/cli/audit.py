"""`longstrand audit`."""

from __future__ import annotations

from typing import Annotated

import typer

from longstrand.cli.commands import Overrides, RecipeFile, app
from longstrand.config import load_recipe


@app.command()
def audit(
    recipe: RecipeFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show per layer which form of each op runs, why, and what one real step really ran; fails where they differ."""
    settings = load_recipe(recipe, overrides)
    from longstrand.checks.audit import run_audit

    run_audit(settings, as_json=as_json)
