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
    device: Annotated[str, typer.Option(help="A built-in device, or a TOML with its numbers.")] = "CPU",
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many; by default as the recipe says, or 1.")
    ] = None,
    length: Annotated[str | None, typer.Option(help='Tokens of a sequence: "131072", "512k", "1M".')] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences per step, over all devices.")] = 1,
    host_memory: Annotated[
        float | None, typer.Option(min=0, help="GiB (2^30 bytes) of one host; on this CPU: of this machine.")
    ] = None,
    host_disk: Annotated[
        float | None, typer.Option(min=0, help="GiB of disk that spools of one host may take.")
    ] = None,
    this_host: Annotated[
        bool, typer.Option("--this-host", help="Judge this machine's memory, limits and disks too.")
    ] = False,
    data_skew: Annotated[
        float, typer.Option(min=1, help="Tokens of the busiest expert rank over the mean; see probe.")
    ] = 1.0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float64.")] = None,
    trainable: Annotated[
        str, typer.Option(help="Parameter groups that learn, with commas: all, or " + ", ".join(GROUPS))
    ] = "all",
    optimizer: Annotated[str, typer.Option(help="Where it may be: device, host or auto.")] = "auto",
    fit: Annotated[
        str | None,
        typer.Option(metavar="length|devices", help="The longest sequence, or the fewest devices."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--sweep", metavar="16k..4M", help="A row per length, doubling.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Of --sweep: an SVG or PNG to write.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write a recipe with the levers chosen; must not exist yet.")
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
    from longstrand.cli.plan_answers import calibrate_on, give_answer

    if calibrate:
        calibrate_on([*calibrate, *map(Path, [recipe] if recipe else []), *map(Path, more or [])], write)
        return
    values = Values(
        recipe,
        tuple(more or ()),
        tuple(overrides or ()),
        model,
        device,
        devices,
        length,
        sequences,
        host_memory,
        host_disk,
        this_host,
        data_skew,
        dtype,
        trainable,
        optimizer,
        calibrated,
    )
    give_answer(values, Output(fit, lengths, picture, write, as_json))


@dataclass(frozen=True)
class Values:
    """The options as given."""

    recipe: str | None
    more: tuple[str, ...]
    overrides: tuple[str, ...]
    model: str | None
    device: str
    devices: int | None
    length: str | None
    sequences: int
    host_memory: float | None
    host_disk: float | None
    this_host: bool
    data_skew: float
    dtype: str | None
    trainable: str
    optimizer: str
    calibrated: Path | None


@dataclass(frozen=True)
class Output:
    """Which question, and where the answer goes."""

    fit: str | None
    lengths: str | None
    picture: Path | None
    write: Path | None
    as_json: bool
