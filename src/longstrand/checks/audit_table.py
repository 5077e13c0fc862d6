"""An audit as a table in the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from longstrand.wording import count, places

WIDTH = 100
COLUMNS = {"op": 21, "runs in": 15, "why": 19, "padding": 18, "kernels called": 23}
Row = tuple[tuple[str, ...], bool]
"""Cells, and whether something is wrong with them."""


def show_audit(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Layers with equal rows together; what was refused, and what is not as asked, below."""
    console = console or Console(width=WIDTH)

    def say(text: str, style: str | None = None) -> None:
        console.print(text, highlight=False, markup=False, style=style)

    observed = found["observed"]
    say(
        f"{found['dtype']} on the {found['device']}; CPU kernels: {found['cpu']}; kernels.require = "
        f'"{found["require"]}"; padding at {count(found["tokens"])} tokens in tiles of {count(found["tile"])}; '
        f"seen in one step of {count(observed['tokens'])} tokens"
    )
    for number, (title, rows) in enumerate(_groups(found)):
        say(title, "bold")
        console.print(_table(rows, with_head=number == 0), highlight=False)
    say("A CUDA kernel was no choice for any op: this project has none of its own.")
    if found["config_is_silent_on"]:
        say(f"config.json leaves to defaults: {', '.join(found['config_is_silent_on'])}.")
    for name, times in observed["cuda_kernels"].items():
        say(f"CUDA kernel seen {count(times)} times: {name}")
    for words, layers in _alike(found["mismatches"]):
        say(f"{places(layers)}, {words}", "bold red")
    if found["passed"]:
        say("What ran is what was planned and asked.")


def _alike(mismatches: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, list[int | str]]]:
    """What differs in the same way in several layers, once."""
    found: dict[str, list[int | str]] = {}
    for each in mismatches:
        words = f"{each['op']}: asked {each['asked']}; ran {each['ran']}; {each['remedy']}"
        found.setdefault(words, []).append(each["layer"])
    return found.items()


def _groups(found: Mapping[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """Layers that were planned alike and ran alike, with their rows."""
    seen = {each["layer"]: {op["op"]: op for op in each["ops"]} for each in found["observed"]["layers"]}
    wrong = {(each["layer"], each["op"]) for each in found["mismatches"]}
    for planned in found["layers"]:
        alike: list[tuple[list[Row], list[int | str]]] = []
        for place in planned["layers"]:
            ran = seen.get(place, {})
            rows = [_row(op, ran.get(op["op"]), wrong=(place, op["op"]) in wrong) for op in planned["ops"]]
            known = next((members for other, members in alike if other == rows), None)
            if known is None:
                alike.append((rows, [place]))
            else:
                known.append(place)
        for rows, members in alike:
            title = places(members)
            yield title if title == planned["kind"] else f"{title}: {planned['kind']}", rows


def _table(rows: list[Row], *, with_head: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, width=WIDTH, show_header=with_head)
    for name, width in COLUMNS.items():
        table.add_column(name, width=width)
    for cells, wrong in rows:
        table.add_row(*cells, style="bold red" if wrong else None)
    return table


def _row(op: Mapping[str, Any], seen: Mapping[str, Any] | None, *, wrong: bool) -> Row:
    padding = f"{op['padding_percent']:.4g} %: {op['padding']}" if op["padding"] else "0"
    return (op["op"], op["runs_in"].rpartition(" ")[0], op["why"], padding, _called(seen)), wrong


def _called(seen: Mapping[str, Any] | None) -> str:
    """The kernels without their op's name and dtype, and how often each was called."""
    if seen is None:
        return "did not run"
    begin = len(seen["kernels_begin"])
    names = ((re.sub(r"_?(float32|bfloat16)$", "", name[begin:]), n) for name, n in seen["kernels"].items())
    return ", ".join(f"{name or 'forward'} {count(n)}" for name, n in names) or "none"
