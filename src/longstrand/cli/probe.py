"""`longstrand probe`: how unevenly real sequences use experts and pools, against random tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longstrand.cli.arguments import tokens_of
from longstrand.cli.commands import Overrides, RecipeFile, app
from longstrand.config import load_recipe


@app.command()
def probe(
    recipe: RecipeFile,
    overrides: Overrides = None,
    sequences: Annotated[
        int, typer.Option(min=1, help="Real sequences to run, and as many random ones.")
    ] = 2,
    tokens: Annotated[
        str | None, typer.Option(help='Cut each to this many tokens: "16k"; by default they are whole.')
    ] = None,
    expert_ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks to spread the experts over; by default the recipe's parallel.expert."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here as well; must not exist yet.")] = None,
) -> None:
    """Measure expert load and attention distances on real sequences against random tokens."""
    settings = load_recipe(recipe, overrides)
    length = None if tokens is None else tokens_of("--tokens", tokens)
    from longstrand.checks.probe import Asked, run_probe

    run_probe(settings, Asked(sequences, length, expert_ranks), as_json=as_json, out=out)
