"""`longstrand plan`: its options. What they ask is answered in `plan_answers.py`, which loads more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from longstrand.config import GROUPS

WIDTH = 100
"""Columns of what is printed."""


def plan(  # noqa: PLR0913 (the options of a command)
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Plan this recipe as it stands.")
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="More runs of --calibrate.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a setting of the recipe.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Without a recipe: a built-in shape, a config.json, or a model folder.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="A built-in device, or a TOML with its numbers; by default CPU.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="How many; by default as the recipe says, or 1.")
    ] = None,
    length: Annotated[str | None, typer.Option(help='Tokens of a sequence: "131072", "512k", "1M".')] = None,
    sequences: Annotated[
        int | None, typer.Option(help="Sequences per step, over all devices; by default 1.")
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(help="GiB (2^30 bytes) of one host; on a CPU by default of this machine.")
    ] = None,
    host_disk: Annotated[
        float | None, typer.Option(help="GiB of disk that spools of one host may take.")
    ] = None,
    this_host: Annotated[
        bool, typer.Option("--this-host", help="Judge this machine's memory, limits and disks too.")
    ] = False,
    data_skew: Annotated[
        float | None,
        typer.Option(help="Tokens of the busiest expert rank over the mean, from 1; probe measures it."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float64.")] = None,
    trainable: Annotated[
        str | None,
        typer.Option(
            help=f"Parameter groups that learn, with commas: all (the default), or {', '.join(GROUPS)}"
        ),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Where it may be: device, host or auto (the default).")
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(metavar="length|devices", help="The longest sequence, or the fewest devices."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--sweep", metavar="16k..4M", help="A row per length, doubling.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Of --sweep: an SVG or PNG to write; must not exist yet.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="A recipe with the levers chosen, or the calibration; must not exist yet."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    calibrated: Annotated[
        Path | None, typer.Option(help="Factors of the seconds, as --calibrate wrote them.")
    ] = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Fit the seconds to finished runs; may be repeated."),
    ] = None,
) -> None:
    """Say what a run will need before it runs: bytes, seconds, levers; no GPU and no torch."""
    options = Options(**locals())  # each by its own name
    from longstrand.cli.plan_answers import give_answer

    give_answer(options)


@dataclass(frozen=True)
class Options:
    """The options as given; what is absent is None, False or empty."""

    recipe: str | None = None
    more: list[str] | None = None
    overrides: list[str] | None = None
    model: str | None = None
    device: str | None = None
    devices: int | None = None
    length: str | None = None
    sequences: int | None = None
    host_memory: float | None = None
    host_disk: float | None = None
    this_host: bool = False
    data_skew: float | None = None
    dtype: str | None = None
    trainable: str | None = None
    optimizer: str | None = None
    fit: str | None = None
    lengths: str | None = None
    picture: Path | None = None
    write: Path | None = None
    as_json: bool = False
    calibrated: Path | None = None
    calibrate: list[Path] | None = None
