"""`longstrand plan`: what a run will need, before it runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from longstrand.cli.plan_asked import Asked, Values, of_model, of_recipe, tokens_of
from longstrand.config import GROUPS
from longstrand.errors import CheckFailed, UserError
from longstrand.plan.host import file_shortages, host_needs, shortages, this_machine
from longstrand.plan.inverse import doubling_lengths, fewest_devices, longest_sequence, sweep
from longstrand.plan.search import Plan, as_it_stands, search
from longstrand.plan.summary import as_dict, what_is_missing
from longstrand.wording import count


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
    if calibrate:
        _calibrate([*calibrate, *map(Path, [recipe] if recipe else []), *map(Path, more or [])], write)
        return
    if more:
        raise UserError(f"plan {recipe} {more[0]}: one recipe at a time; several runs belong to --calibrate")
    _require_one(fit, lengths, picture, write)
    values = Values(
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
    asked = (
        of_recipe(recipe, overrides, values, model)
        if recipe
        else of_model(model, overrides, values, fit, lengths)
    )
    output = _Output(picture, write, as_json)
    if lengths is not None:
        _sweep(asked, lengths, output)
    elif fit is not None:
        _fit(asked, fit, output)
    else:
        _plan(asked, output)


@dataclass(frozen=True)
class _Output:
    picture: Path | None
    write: Path | None
    as_json: bool


def _calibrate(runs: list[Path], write: Path | None) -> None:
    """Fits the seconds to finished runs and says how far off they were; --write keeps the factors."""
    from longstrand.cli.plan_tables import make_console, show_calibration
    from longstrand.plan.calibrate import calibrate

    if write is not None and write.exists():
        raise UserError(
            f"--write {write}: exists, and is never overwritten; remove it or choose another name"
        )
    found = calibrate(runs)
    show_calibration(found.show(), found.factors, found.notes, make_console())
    if write is not None:
        found.write(write)
        typer.echo(f"{write}: written; use it with --calibrated {write}")


def _plan(asked: Asked, output: _Output) -> None:
    if asked.recipe is not None and asked.room.num_devices != asked.job.world:
        raise UserError(
            f"--devices {asked.room.num_devices}: the recipe is for parallel.data x parallel.context = "
            f"{asked.job.world} ranks; change those with --set, or ask --fit devices"
        )
    found = as_it_stands(asked.job, asked.room) if asked.recipe else search(asked.job, asked.room)
    _show(found, asked, output)
    if found.fits:
        _write(found, asked, output)
        return
    better = search(asked.job, asked.room) if asked.recipe else found
    if better.fits:
        _say_what_would(better, output)
        _write(better, asked, output)
    _fail(found)


def _fit(asked: Asked, what: str, output: _Output) -> None:
    if what == "length":
        longest = longest_sequence(asked.job, asked.room)
        if longest is None:
            _fail(search(replace(asked.job, length=1024), asked.room))
        _show(longest.plan, asked, output)
        if not output.as_json:
            after = longest.next_plan
            ends = (
                "the search ends there"
                if after is None
                else f"at {count(after.job.length)}: {what_is_missing(after)}"
            )
            tokens = count(longest.plan.job.length)
            typer.echo(
                f"The longest sequence is {tokens} tokens (rounded down to a multiple of 1,024); {ends}."
            )
        _write(longest.plan, asked, output)
        return
    found = fewest_devices(asked.job, asked.room)
    _show(found, asked, output)
    if not found.fits:
        _fail(found)
    if not output.as_json:
        typer.echo(f"The fewest are {count(found.room.num_devices)} devices (whole hosts above one host).")
    _write(found, asked, output)


def _sweep(asked: Asked, text: str, output: _Output) -> None:
    first, dots, last = text.partition("..")
    if not dots:
        raise UserError(f"--sweep {text}: must be two lengths, such as 16k..4M")
    ends = (tokens_of("--sweep", first), tokens_of("--sweep", last))
    plans = sweep(asked.job, asked.room, doubling_lengths(*ends))
    if output.as_json:
        typer.echo(json.dumps([as_dict(each) for each in plans], indent=1))
    else:
        from longstrand.cli.plan_tables import make_console, show_sweep

        show_sweep(plans, asked.found.name, make_console())
    if output.picture is not None:
        from longstrand.report.lengths import write_picture

        write_picture(plans, asked.found.name, output.picture)
        typer.echo(f"{output.picture}: written", err=output.as_json)
    if not any(each.fits for each in plans):
        _fail(plans[0])


def _show(found: Plan, asked: Asked, output: _Output) -> None:
    problems, needs, machine = [], None, this_machine()
    if asked.here and asked.recipe is not None:
        needs = host_needs(found.job, found.room, len(asked.recipe.data.sources))
        out = Path(asked.recipe.run.out)
        spool = Path(asked.recipe.memory.spool or out)
        keep = asked.recipe.train.keep
        problems = [*shortages(needs, machine), *file_shortages(needs, spool, out, keep)]
    if output.as_json:
        typer.echo(json.dumps(as_dict(found) | {"model": asked.found.source, "problems": problems}, indent=1))
    else:
        from longstrand.cli.plan_tables import make_console, show_host, show_plan

        console = make_console()
        show_plan(found, asked.found.source, console)
        if needs is not None:
            show_host(needs, machine, problems, console)
    if problems and found.fits:
        raise CheckFailed("this host has no room for the run: " + "; ".join(problems))


def _say_what_would(better: Plan, output: _Output) -> None:
    from longstrand.plan.summary import setting

    sets = [f"--set {setting(step).replace(' ', '')}" for step in better.steps]
    mesh = better.job.parallel
    for name in ("data", "context", "expert"):
        sets.append(f"--set parallel.{name}={getattr(mesh, name)}")
    typer.echo(f"It would fit with {' '.join(dict.fromkeys(sets))}", err=output.as_json)


def _write(found: Plan, asked: Asked, output: _Output) -> None:
    if output.write is None:
        return
    from longstrand.cli.plan_recipe import write_plan

    for path in write_plan(output.write, found, asked.found, asked.recipe):
        typer.echo(f"{path}: written", err=output.as_json)


def _fail(found: Plan) -> NoReturn:
    raise CheckFailed(
        f"does not fit: {what_is_missing(found)}; use more or larger devices, or a shorter length"
    )


def _require_one(fit: str | None, lengths: str | None, picture: Path | None, write: Path | None) -> None:
    if fit not in (None, "length", "devices"):
        raise UserError(f"--fit {fit}: must be length or devices")
    if fit is not None and lengths is not None:
        raise UserError("--fit and --sweep: each is a question of its own; ask one at a time")
    if picture is not None and lengths is None:
        raise UserError(f"--picture {picture}: shows a sweep; add --sweep 16k..4M")
    if picture is not None and picture.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"--picture {picture}: must end in .svg or .png")
    if write is not None and lengths is not None:
        raise UserError(f"--write {write}: a sweep has many plans; ask for one length")
