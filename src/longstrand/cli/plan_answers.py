"""What `longstrand plan` was asked: a plan, a longest sequence, a fewest devices, a sweep, a calibration."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import typer

from longstrand.cli.arguments import tokens_of
from longstrand.cli.plan import WIDTH, Output, Values
from longstrand.cli.plan_asked import Asked, of_model, of_recipe
from longstrand.errors import CheckFailed, UserError
from longstrand.plan.host import HostNeeds, file_shortages, host_needs, shortages, this_machine
from longstrand.plan.inverse import doubling_lengths, fewest_devices, longest_sequence, sweep
from longstrand.plan.search import Plan, as_it_stands, search
from longstrand.plan.summary import as_dict, setting, what_is_missing
from longstrand.wording import count


def give_answer(values: Values, output: Output) -> None:
    """Answers, prints, and writes what was asked for.

    Raises:
        UserError: what was asked cannot be.
        CheckFailed: it does not fit.
    """
    _require_one(output)
    asked = (
        of_recipe(values)
        if values.recipe
        else of_model(values, needs_length=output.fit != "length" and not output.lengths)
    )
    if output.lengths is not None:
        _sweep(asked, output.lengths, output)
    elif output.fit is not None:
        _fit(asked, output.fit, output)
    else:
        _plan(asked, output)


def calibrate_on(runs: list[Path], write: Path | None) -> None:
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


def _plan(asked: Asked, output: Output) -> None:
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


def _fit(asked: Asked, what: str, output: Output) -> None:
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
            rounded = f"The longest sequence is {tokens} tokens (rounded down to a multiple of 1,024)"
            typer.echo(textwrap.fill(f"{rounded}; {ends}.", WIDTH))
        _write(longest.plan, asked, output)
        return
    found = fewest_devices(asked.job, asked.room)
    _show(found, asked, output)
    if not found.fits:
        _fail(found)
    if not output.as_json:
        typer.echo(f"The fewest are {count(found.room.num_devices)} devices (whole hosts above one host).")
    _write(found, asked, output)


def _sweep(asked: Asked, text: str, output: Output) -> None:
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


def _show(found: Plan, asked: Asked, output: Output) -> None:
    needs, problems = _judge_host(found, asked) if asked.here else (None, [])
    if output.as_json:
        typer.echo(json.dumps(as_dict(found) | {"model": asked.found.source, "problems": problems}, indent=1))
    else:
        from longstrand.cli.plan_tables import make_console, show_host, show_plan

        console = make_console()
        show_plan(found, asked.found.source, console)
        if needs is not None:
            show_host(needs, this_machine(), problems, console)
    if problems and found.fits:
        raise CheckFailed("this host has no room for the run: " + "; ".join(problems))


def _judge_host(found: Plan, asked: Asked) -> tuple[HostNeeds, list[str]]:
    """What this machine has to give and lacks; files stand in the working directory where no recipe says where."""
    recipe = asked.recipe
    out = Path(recipe.run.out if recipe else ".")
    spool = Path(recipe.memory.spool or out) if recipe else out
    needs = host_needs(found.job, found.room, len(recipe.data.sources) if recipe else 1)
    keep = recipe.train.keep if recipe else 2
    return needs, [*shortages(needs, this_machine()), *file_shortages(needs, spool, out, keep)]


def _say_what_would(better: Plan, output: Output) -> None:
    sets = [f"--set {setting(step).replace(' ', '')}" for step in better.steps]
    mesh = better.job.parallel
    for name in ("data", "context", "expert"):
        sets.append(f"--set parallel.{name}={getattr(mesh, name)}")
    typer.echo(f"It would fit with {' '.join(dict.fromkeys(sets))}", err=output.as_json)


def _write(found: Plan, asked: Asked, output: Output) -> None:
    if output.write is None:
        return
    from longstrand.cli.plan_recipe import write_plan

    for path in write_plan(output.write, found, asked.found, asked.recipe):
        typer.echo(f"{path}: written", err=output.as_json)


def _fail(found: Plan) -> NoReturn:
    raise CheckFailed(
        f"does not fit: {what_is_missing(found)}; use more or larger devices, or a shorter length"
    )


def _require_one(output: Output) -> None:
    fit, lengths, picture = output.fit, output.lengths, output.picture
    if fit not in (None, "length", "devices"):
        raise UserError(f"--fit {fit}: must be length or devices")
    if fit is not None and lengths is not None:
        raise UserError("--fit and --sweep: each is a question of its own; ask one at a time")
    if picture is not None and lengths is None:
        raise UserError(f"--picture {picture}: shows a sweep; add --sweep 16k..4M")
    if picture is not None and picture.suffix.lower() not in (".svg", ".png"):
        raise UserError(f"--picture {picture}: must end in .svg or .png")
    if output.write is not None and lengths is not None:
        raise UserError(f"--write {output.write}: a sweep has many plans; ask for one length")
