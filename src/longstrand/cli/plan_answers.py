"""What `longstrand plan` was asked: a plan, a longest sequence, a fewest devices, a sweep, a calibration."""

from __future__ import annotations

import json
import shlex
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from longstrand.cli.arguments import tokens_of
from longstrand.cli.plan import WIDTH, Options
from longstrand.cli.plan_asked import Asked, of_model, of_recipe
from longstrand.cli.plan_options import question_of
from longstrand.errors import CheckFailed, UserError
from longstrand.plan.inverse import LENGTHS, doubling_lengths, fewest_devices, longest_sequence, sweep
from longstrand.plan.room import not_judged
from longstrand.plan.search import Plan, as_it_stands, search
from longstrand.plan.summary import as_dict, gib, what_is_missing
from longstrand.plan.terms import Place
from longstrand.plan.walk import MAPS, PACK
from longstrand.wording import count, size_bytes

_LARGER: dict[Place, str] = {
    "device": "larger devices",
    "host": "hosts with more memory",
    "file": "more room on that disk, or another for memory.spool",
}


def give_answer(options: Options) -> None:
    """Answers, prints, and writes what was asked for.

    Raises:
        UserError: what was asked cannot be.
        CheckFailed: it does not fit.
    """
    question = question_of(options)
    if question == "--calibrate":
        _calibrate(options)
        return
    asked = of_recipe(options, question) if options.recipe else of_model(options, question)
    answers = {"a plan": _plan, "--fit length": _longest, "--fit devices": _fewest, "--sweep": _sweep}
    answers[question](asked, options)


def _plan(asked: Asked, options: Options) -> None:
    if asked.recipe is not None and asked.room.num_devices != asked.job.world:
        raise UserError(
            f"--devices {asked.room.num_devices}: the recipe is for parallel.data x parallel.context = "
            f"{asked.job.world} ranks; change those with --set, or ask --fit devices"
        )
    found = as_it_stands(asked.job, asked.room) if asked.recipe else search(asked.job, asked.room)
    problems = _show(found, asked, options)
    if not found.fits and asked.recipe:
        better = search(asked.job, asked.room)
        if better.fits:
            _say_what_would(better, asked, options)
            _write(better, asked, options)
    _end(found, problems)
    _write(found, asked, options)


def _longest(asked: Asked, options: Options) -> None:
    longest = longest_sequence(asked.job, asked.room)
    if longest is None:
        shortest = search(replace(asked.job, length=LENGTHS), asked.room)
        raise CheckFailed(
            f"not even {LENGTHS:,} tokens fit: {_missing(shortest)}; {_remedy(shortest, shorter=False)}"
        )
    problems = _show(longest.plan, asked, options)
    _end(longest.plan, problems)
    after, tokens = longest.next_plan, count(longest.plan.job.length)
    ends = (
        "the search ends there"
        if after is None
        else f"at {count(after.job.length)}: {what_is_missing(after)}"
    )
    rounded = f"The longest sequence is {tokens} tokens (rounded down to a multiple of {LENGTHS:,})"
    unjudged = not_judged(longest.plan.job, longest.plan.room).get("file")
    beside = f", with {gib(unjudged)} GiB of disk per host, not judged (--host-disk)" if unjudged else ""
    if asked.room.has_bound_spools and asked.room.spool_bytes is not None:
        beside += f"; ulimit -f allows each rank's spool no more than {size_bytes(asked.room.spool_bytes)}"
    _say(f"{rounded}; {ends}{beside}.", options)
    _write(longest.plan, asked, options)


def _fewest(asked: Asked, options: Options) -> None:
    found = fewest_devices(asked.job, asked.room)
    plan, most = found.plan, f"{count(found.most_tried)} devices"
    problems = _show(plan, asked, options)
    if not plan.fits:
        raise CheckFailed(
            f"does not fit on one host, nor on any doubling of it up to {most}; closest are "
            f"{count(plan.room.num_devices)}, where "
            f"{_missing(plan)}; {_remedy(plan, more=False)}"
        )
    _end(plan, problems)
    number = plan.room.num_devices
    _say(f"The fewest: {count(number)} device{'s' * (number > 1)} (whole hosts above one host).", options)
    _write(plan, asked, options)


def _sweep(asked: Asked, options: Options) -> None:
    text = str(options.lengths)
    first, dots, last = text.partition("..")
    if not dots:
        raise UserError(f"--sweep {text}: must be two lengths, such as 16k..4M")
    ends = (tokens_of("--sweep", first), tokens_of("--sweep", last))
    plans = sweep(asked.job, asked.room, doubling_lengths(*ends))
    _warn_of_calibration(plans[0], options)
    if options.as_json:
        typer.echo(json.dumps([_record(each, asked, alone=False) for each in plans], indent=1))
    else:
        from longstrand.cli.plan_tables import make_console, show_sweep

        show_sweep(plans, asked.found.name, make_console())
    if options.picture is not None:
        from longstrand.report.lengths import write_picture

        write_picture(plans, asked.found.name, options.picture)
        typer.echo(f"{options.picture}: written", err=options.as_json)
    if not any(each.fits for each in plans):
        _end(plans[0], [])


def _calibrate(options: Options) -> None:
    """Fits the seconds to finished runs and says how far off they were; --write keeps the factors."""
    from longstrand.plan.calibrate import calibrate

    runs = [*(options.calibrate or ()), *map(Path, [options.recipe] if options.recipe else [])]
    found = calibrate([*runs, *map(Path, options.more or ())])
    if options.as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        from longstrand.cli.plan_tables import make_console, show_calibration

        show_calibration(found, make_console())
    if options.write is not None:
        found.write(options.write)
        text = f"{options.write}: written; use it with --calibrated {options.write}"
        typer.echo(text, err=options.as_json)


def _show(found: Plan, asked: Asked, options: Options) -> list[str]:
    """Prints a plan; returns what this host lacks for it."""
    needs, problems = asked.here.judge(found.job, found.room) if asked.here else (None, [])
    _warn_of_calibration(found, options)
    if options.as_json:
        typer.echo(json.dumps(_record(found, asked) | {"problems": problems}, indent=1))
        return problems
    from longstrand.cli.plan_tables import make_console, show_host, show_plan, show_verdict

    console = make_console()
    show_plan(found, asked.found.source, console)
    if needs is not None and asked.here is not None:
        show_host(needs, asked.here.machine, problems, console)
    show_verdict(found, problems, console)
    return problems


def _record(found: Plan, asked: Asked, *, alone: bool = True) -> dict[str, Any]:
    """For JSON."""
    fitted = found.room.fitted
    return as_dict(found, alone=alone) | {
        "model": asked.found.source,
        "not_judged_bytes": not_judged(found.job, found.room),
        "calibrated": None if fitted is None else fitted.as_dict(),
    }


def _warn_of_calibration(found: Plan, options: Options) -> None:
    fitted = found.room.fitted
    if fitted is not None and fitted.is_elsewhere(found.job):
        typer.echo(
            f"warning: --calibrated {options.calibrated}: fitted on {fitted.origin.spread}; of other ranks and threads "
            "its seconds stay estimates",
            err=True,
        )


def _say(text: str, options: Options) -> None:
    if not options.as_json:
        typer.echo(textwrap.fill(text, WIDTH))


def _say_what_would(better: Plan, asked: Asked, options: Options) -> None:
    """The settings in which the recipe differs from what fits."""
    sets = []
    for section in ("memory", "parallel"):
        before, after = getattr(asked.recipe, section).model_dump(), getattr(better.job, section).model_dump()
        sets += [
            f"--set {section}.{name}={_bare(value)}" for name, value in after.items() if before[name] != value
        ]
    typer.echo(f"It would fit with {' '.join(sets)}", err=options.as_json)


def _bare(value: Any) -> str:
    """A value as --set reads it, without quotes that a shell takes away."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def _write(found: Plan, asked: Asked, options: Options) -> None:
    if options.write is None:
        return
    from longstrand.cli.plan_recipe import write_plan

    for path in write_plan(options.write, found, asked.found, asked.recipe, _room(options)):
        typer.echo(f"{path}: written", err=options.as_json)


def _room(options: Options) -> str:
    """The options that say in which room and by which numbers, as they are typed."""
    given = {
        "--device": options.device,
        "--host-memory": options.host_memory,
        "--host-disk": options.host_disk,
        "--data-skew": options.data_skew,
        "--calibrated": options.calibrated,
    }
    shown = [
        f" {name} {shlex.quote(f'{value:.15g}' if isinstance(value, float) else str(value))}"
        for name, value in given.items()
        if value is not None
    ]
    return "".join(shown) + " --this-host" * options.this_host


def _end(found: Plan, problems: list[str]) -> None:
    """Ends with 3 where a plan does not fit its limits, or this host has no room for it."""
    if not found.fits:
        raise CheckFailed(f"does not fit: {_missing(found)}; {_remedy(found)}")
    if problems:
        raise CheckFailed("this host has no room for the run: " + "; ".join(problems))


def _missing(found: Plan) -> str:
    """Over several limits a lever that helps one may cost another: with one limit fewer the rest may be closer."""
    least = "; of all levers these leave the least sum over the limits" * (len(found.missing) > 1)
    return what_is_missing(found) + least


def _remedy(found: Plan, *, more: bool = True, shorter: bool = True) -> str:
    """What to take where something is short.

    Args:
        more, shorter: whether more devices or a shorter length may help.
    """
    if "device" in found.missing and _largest(found) == MAPS:
        fewer = "fewer context ranks, whose number KDA's maps and states grow with (fewer devices, or more sequences "
        return f"take {fewer}per step){', or a shorter length' * shorter}"
    if "device" in found.missing and _largest(found) == PACK and found.job.sequences_per_step > 1:
        fewer = "fewer sequences per step, of which every rank holds the tokens of all"
        return f"take {fewer}{', or a shorter length' * shorter}"
    names = _LARGER | {"device": "a machine with more memory"} if found.room.is_cpu else _LARGER
    if found.room.has_bound_spools:
        names = names | {"file": 'a higher ulimit -f, or memory.offload = "none"'}
    larger = [names[place] for place in found.missing]
    if more and not found.room.is_cpu and "file" not in found.missing:
        larger[0] = f"more or {larger[0]}"
    return f"take {', '.join(larger)}{', or a shorter length' * shorter}"


def _largest(found: Plan) -> str:
    """The name of the term that takes most of a device."""
    return max(found.memory.device, key=lambda term: term.num_bytes).name
