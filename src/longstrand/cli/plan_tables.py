"""A plan on the terminal: memory by term, seconds by term, levers in order, and what was not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longstrand.cli.plan import WIDTH
from longstrand.plan.devices import GIB
from longstrand.plan.host import HostNeeds, Machine
from longstrand.plan.room import Room, not_judged
from longstrand.plan.search import Plan
from longstrand.plan.summary import (
    COSTS,
    NOT_ON_A_GPU,
    PLACES,
    cores_short,
    effect,
    faster_with,
    gib,
    loading_bytes,
    place_of,
    reason,
    setting,
    terms_in,
    threads_of,
)
from longstrand.plan.terms import Place, Term, total
from longstrand.wording import count, duration, short_tokens, size_bytes

if TYPE_CHECKING:  # it loads numpy
    from longstrand.plan.calibrate import Calibration, Row

LINE = "\n"
NONE = "\u2013"


def make_console() -> Console:
    """Of the width that all tables fit."""
    return Console(width=WIDTH, highlight=False)


def show_plan(plan: Plan, model: str, console: Console) -> None:
    """All that a plan says."""
    console.print(headline(plan, model), markup=False)
    console.print(_device_table(plan))
    console.print(_host_table(plan))
    console.print(_seconds_table(plan))
    show_levers(plan, console)
    for each in dict.fromkeys(term.evidence for term in _all_terms(plan)):
        console.print(Padding(Text(each, "dim"), (0, 0, 0, 2)))
    where = plan.room.device.source or "as the device says them"
    rates = f"  rates of the seconds: {where} (--json: from which part of which each is)"
    console.print(rates, style="dim", markup=False)
    _show_calibrated(plan, console)
    for other in faster_with(plan):
        words = f"{other.gain:.0%} more tokens/s, {gib(other.device_bytes)} GiB per device"
        console.print(f"Fits too, and is planned faster: {other.setting} ({words}).", markup=False)
    if short := cores_short(plan):
        console.print(short, markup=False)
    if loading := loading_bytes(plan):
        words = "each rank reads a layer whole, then keeps its part of it; not judged"
        console.print(f"Loading takes up to {gib(loading)} GiB of each host: {words}.", markup=False)
    if not plan.room.is_cpu:
        console.print(NOT_ON_A_GPU, markup=False)


def show_verdict(plan: Plan, problems: Sequence[str], console: Console) -> None:
    """The last line: whether it fits what was judged.

    Args:
        problems: what this host lacks beside the limits of the plan.
    """
    good = plan.fits and not problems
    console.print(verdict(plan, problems), markup=False, style="bold" if good else "bold red")


def headline(plan: Plan, model: str) -> str:
    """What was planned, on what."""
    job, room, mesh = plan.job, plan.room, plan.job.parallel
    hosts = f" on {room.num_hosts} hosts" if room.num_hosts > 1 else ""
    made_for = job.shape.max_position_embeddings
    beyond = (
        f"\nBeyond the {short_tokens(made_for)} tokens that the model was made for."
        if job.length > made_for
        else ""
    )
    asked = (
        f"{short_tokens(job.length)} tokens ({count(job.length)}), {count(job.sequences_per_step)} per step, "
        f"{job.dtype}, trained: {', '.join(job.trainable)}"
    )
    one_line = len(model) + 2 + len(asked) <= WIDTH
    return (
        f"{model}:{' ' if one_line else LINE}{asked}\n"
        f"{room.num_devices} x {room.device.name}{hosts}{threads_of(plan)}: data {mesh.data} x context {mesh.context}, "
        f"expert {mesh.expert}{beyond}"
    )


def verdict(plan: Plan, problems: Sequence[str] = ()) -> str:
    """Whether it fits, what of it was judged, and how fast it is."""
    limit = plan.room.limit("device")
    if not plan.fits:
        over = (
            f"{gib(num_bytes)} GiB too many on {place_of(plan.room, place)}"
            for place, num_bytes in plan.missing.items()
        )
        return f"Does not fit: {', '.join(over)}."
    used = f"{gib(plan.memory.device_bytes)}{f' of {gib(limit)}' if limit else ''} GiB per device"
    rate = f"{duration(plan.seconds.total)} per step, {tokens_per_second(plan)} tokens/s"
    if problems:
        return f"Fits the devices ({used}), but this host has no room for the run."
    unjudged = _unjudged(plan)
    if not unjudged:
        return f"Fits: {used}; {rate}."
    return f"Fits the devices: {used}; {rate}.\nNot judged: {unjudged}."


def _unjudged(plan: Plan) -> str:
    """What is needed where no limit is known."""
    where = {"host": "of memory of each host (--host-memory)", "file": "on each host's disk (--host-disk)"}
    needs = not_judged(plan.job, plan.room)
    return " and ".join(f"{gib(num_bytes)} GiB {where[place]}" for place, num_bytes in needs.items())


def _show_calibrated(plan: Plan, console: Console) -> None:
    fitted = plan.room.fitted
    if fitted is None:
        return
    text = Text(f"seconds: calibrated by {fitted.file}, fitted on {fitted.origin}")
    console.print(Padding(text, (0, 0, 0, 2)))
    elsewhere, names = fitted.is_elsewhere(plan.job), [term.name for term in plan.seconds.terms]
    kept = names if elsewhere else [name for name in names if name not in fitted.determined]
    why = "of other ranks or threads, so still estimates" if elsewhere else "not determined by its runs alone"
    if kept:
        text = Text(f"seconds: {why}: {', '.join(kept)}", "dim")
        console.print(Padding(text, (0, 0, 0, 2)))


def show_levers(plan: Plan, console: Console) -> None:
    """One after the other, each beside those above it."""
    if not plan.steps:
        console.print("\nNo lever is on: none is needed.\n" if plan.fits else "\nNo lever helps.\n")
        return
    title = "levers, each beside those above it" + "; the fastest that fit" * plan.chosen
    table = _table(title, "setting", "why", "bought, GiB per rank", "costs")
    for step in plan.steps:
        cost = f"{'-' if step.seconds < 0 else '+'}{_seconds(abs(step.seconds))} s: {COSTS[step.setting]}"
        bought = effect(step).removeprefix("GiB per rank: ")
        table.add_row(escape(setting(step)), reason(step), bought, cost)
    console.print(table)


def show_host(needs: HostNeeds, machine: Machine, found: Sequence[str], console: Console) -> None:
    """What the ranks of this host take of what it has."""
    table = _table("this host", "", "needed", "there is", "")
    table.add_row("memory, GiB", gib(total(needs.memory)), gib(machine.memory_bytes), machine.memory_rule)
    if needs.pinned is not None:
        locked = "no limit" if machine.locked_bytes is None else gib(machine.locked_bytes)
        table.add_row(
            "pinned per rank, GiB", gib(needs.pinned.exact), locked, f"one exact block; {rounding(needs)}"
        )
    files = "no limit" if machine.open_files is None else count(machine.open_files)
    table.add_row("open files per rank", count(needs.descriptors), files, "files, sockets and mapped sources")
    table.add_row("a checkpoint, GiB", gib(needs.checkpoint_bytes), "", "of the whole run")
    what, num_bytes = needs.largest_file
    if machine.address_bytes is not None:
        mapped, allowed = size_bytes(needs.mapped_bytes), size_bytes(machine.address_bytes)
        table.add_row("mapped per rank", mapped, allowed, "at least")
    if machine.file_bytes is not None:
        table.add_row("a file", size_bytes(num_bytes), size_bytes(machine.file_bytes), f"of a rank: {what}")
    console.print(table)
    for each in found:
        console.print(f"  {each}", markup=False, style="bold red")


def rounding(needs: HostNeeds) -> str:
    """What another allocator would pin."""
    assert needs.pinned is not None
    return f"a block per stream, rounded to powers of two as torch does, would be {gib(needs.pinned.rounded)}"


def show_sweep(plans: Sequence[Plan], model: str, console: Console) -> None:
    """A row per length."""
    room = plans[0].room
    console.print(f"{model} on {room.num_devices} x {room.device.name}, {plans[0].job.dtype}", markup=False)
    table = _table("", "length", "GiB per device", "GiB per host", "in files", "tokens/s", "levers")
    for column in table.columns[:5]:
        column.justify = "right"
    for row in sweep_rows(plans):
        *values, levers = map(escape, row)
        table.add_row(*values, levers.replace(", ", ",\n"))
    console.print(table)
    _show_calibrated(plans[-1], console)
    if not room.is_cpu:
        console.print(NOT_ON_A_GPU, markup=False)
    options: dict[Place, str] = {"host": "--host-memory", "file": "--host-disk"}
    unknown = [
        f"{PLACES[place]} ({option})" for place, option in options.items() if room.limit(place) is None
    ]
    if unknown:
        console.print(f"Not judged: {' and '.join(unknown)}.", markup=False)


def sweep_rows(plans: Iterable[Plan]) -> list[list[str]]:
    """Length, memory of a device and a host, files of a host, tokens per second, levers."""
    rows = []
    for plan in plans:
        levers = ", ".join(setting(step) for step in plan.steps) or "none"
        rate = tokens_per_second(plan) if plan.fits else "does not fit"
        host, files = (gib(total(terms_in(plan, place))) for place in ("host", "file"))
        rows.append([short_tokens(plan.job.length), gib(plan.memory.device_bytes), host, files, rate, levers])
    return rows


def tokens_per_second(plan: Plan) -> str:
    """Over all devices, with three digits: it is estimated."""
    return f"{float(f'{plan.seconds.tokens_per_second(plan.job):.3g}'):,.10g}"


def show_calibration(found: Calibration, console: Console) -> None:
    """How far off the seconds of finished runs were, before, after, and with each run left out; and their memory."""
    columns = ("run", "measured, s", "before", "after", "left out", "planned, MiB", "counted, MiB", "off")
    table = _table(f"seconds of a step, and memory: {found.origin}", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in found.rows:
        errors = (
            NONE if error is None else f"{error:+.1%}" for error in (row.before, row.after, row.left_out)
        )
        table.add_row(escape(row.name), f"{row.seconds:.4g}", *errors, *_memory_of(row))
    console.print(table)
    shown = ", ".join(f"{name} x {factor:.3g}" for name, factor in found.factors.items())
    console.print(f"factors: {shown}", markup=False)
    for note in found.notes:
        console.print(note, markup=False)


def _memory_of(row: Row) -> tuple[str, str, str]:
    """At a step's peak, planned and counted, and how far off the plan was."""
    planned, counted = row.planned_bytes, row.counted_bytes
    sizes = (NONE if num_bytes is None else f"{num_bytes / 2**20:,.1f}" for num_bytes in (planned, counted))
    off = NONE if planned is None or not counted else f"{planned / counted - 1:+.1%}"
    return (*sizes, off)  # type: ignore[return-value]


def _device_table(plan: Plan) -> Table:
    memory, limit = plan.memory, plan.room.limit("device")
    sized, unit = _sized(memory.device_bytes)
    table = _table(f"memory of a device at its peak: {memory.peak_phase}", "", unit, "known by", "how")
    _add_terms(table, memory.device, sized)
    peaks = ", ".join(f"{phase} {sized(total(terms))}" for phase, terms in memory.phases.items())
    table.add_section()
    table.add_row("sum", sized(memory.device_bytes), "", f"peaks: {peaks}", style="bold")
    if limit is not None:
        table.add_row("limit", sized(limit), "", _limit_words(plan.room, "device"))
    return table


def _host_table(plan: Plan) -> Table:
    """On a CPU the terms of all ranks' devices are one row: they stand above."""
    room, terms, files = plan.room, terms_in(plan, "host"), terms_in(plan, "file")
    sized, unit = _sized(total(terms))
    several = "s" * (room.ranks_per_host > 1)
    table = _table(f"memory of a host: {room.ranks_per_host} rank{several}", "", unit, "known by", "how")
    if room.is_cpu:
        ranks = plan.memory.device_bytes * room.ranks_per_host
        table.add_row("tensors", sized(ranks), "measured", f"{room.ranks_per_host} x what stands above")
        names = {term.name for term in plan.memory.device}
        terms = tuple(term for term in terms if term.name not in names)
    _add_terms(table, terms, sized)
    table.add_section()
    table.add_row("sum", sized(total(terms_in(plan, "host"))), "", "", style="bold")
    limit = room.limit("host")
    table.add_row("limit", "" if limit is None else sized(limit), "", _limit_words(room, "host"))
    if files:
        table.add_section()
        _add_terms(table, files, sized)
        free = room.limit("file")
        words = (
            "not given (--host-disk), so not judged" if free is None else f"{sized(free)} {unit} may be taken"
        )
        table.add_row("sum in files", sized(total(files)), "", words)
    return table


def _sized(num_bytes: int) -> tuple[Callable[[int], str], str]:
    """How a table writes bytes, and in what: below a GiB in all in MiB."""
    if num_bytes >= GIB:
        return gib, "GiB"
    return (lambda value: gib(value * 2**10)), "MiB"


def _seconds_table(plan: Plan) -> Table:
    table = _table("seconds of a step", "", "s", "known by", "how")
    for term in plan.seconds.terms:
        table.add_row(term.name, _seconds(term.seconds), _tag(term.evidence), escape(term.why))
    table.add_section()
    rate = f"{tokens_per_second(plan)} tokens/s over all devices"
    table.add_row("sum", _seconds(plan.seconds.total), "", rate, style="bold")
    return table


def _add_terms(table: Table, terms: Iterable[Term], sized: Callable[[int], str]) -> None:
    for term in sorted(terms, key=lambda each: -each.num_bytes):
        table.add_row(term.name, sized(term.num_bytes), _tag(term.evidence), escape(term.why))


def _all_terms(plan: Plan) -> list[Term]:
    return [*plan.memory.device, *terms_in(plan, "host"), *terms_in(plan, "file")]


def _limit_words(room: Room, place: Place) -> str:
    if place == "host" and room.host_bytes is None:
        return "not given (--host-memory), so not judged"
    if place == "device" and room.is_cpu and not room.device.memory_bytes:
        return "the host's share, less what a process takes empty"
    return room.device.name if place == "device" else "one host"


def _seconds(value: float) -> str:
    """With no more digits than an estimate has."""
    if value < 5e-4:
        return "0"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def _tag(evidence: str) -> str:
    return evidence.partition(":")[0]


def _table(title: str, *columns: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title or None,
        title_justify="left",
        title_style="bold",
        min_width=WIDTH - 4,
        pad_edge=False,
        collapse_padding=True,
    )
    for number, name in enumerate(columns):
        right = number > 0 and name in ("GiB", "MiB", "s", "needed", "there is")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table
