"""The picture of a sweep: memory by term and tokens per second over the length, and where each lever comes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from longstrand.atomic import write_new
from longstrand.errors import UserError
from longstrand.plan.devices import GIB
from longstrand.plan.search import Plan
from longstrand.plan.summary import setting
from longstrand.report.drawing import AFTER, INK, MUTED, draw_figure, short_number
from longstrand.wording import short_tokens

_SHOWN = 6
# After Okabe and Ito, as the report's; the rest of the terms is grey.
_COLOURS = ("#0070b4", "#cf5200", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_REST = "#b4bcc6"
_PALE = 0.3


def write_picture(plans: Sequence[Plan], model: str, path: Path) -> None:
    """Draws a sweep into an SVG or a PNG, by the name's ending.

    Raises:
        UserError: it is there already, or cannot be written.
    """

    def draw(figure: Figure) -> None:
        memory, speed = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        room = plans[0].room
        _draw_memory(memory, plans)
        on = f"{model}, {room.num_devices} x {room.device.name}"
        memory.set_title(f"{on}: GiB per device, planned; above each bar what changes there")
        _draw_speed(speed, plans)
        speed.set_title("Tokens per second over all devices, planned")
        speed.set_xticks(range(len(plans)), [short_tokens(plan.job.length) for plan in plans])
        speed.set_xlabel("tokens of a sequence")

    svg, png = draw_figure(draw, (9.0, 6.4))
    try:
        write_new(path, svg if path.suffix.lower() == ".svg" else png)
    except OSError as error:
        raise UserError(
            f"--picture {path}: cannot be written ({error.strerror}); choose another path"
        ) from None


def _draw_memory(axes: Axes, plans: Sequence[Plan]) -> None:
    """Bars by term, pale where a plan does not fit; what a lever becomes is named above the first length with it."""
    named = [{term.name: term.num_bytes / GIB for term in plan.memory.device} for plan in plans]
    shares = [{name: value / sum(terms.values()) for name, value in terms.items()} for terms in named]
    largest = sorted(
        {name for terms in named for name in terms},
        key=lambda name: -max(terms.get(name, 0) for terms in shares),
    )
    below = np.zeros(len(plans))
    parts = [(name, [terms.get(name, 0.0) for terms in named]) for name in largest[:_SHOWN]]
    shown = set(largest[:_SHOWN])
    rest = [sum(value for name, value in terms.items() if name not in shown) for terms in named]
    for (_, values), colour in zip(
        [*parts, ("the rest", rest)], [*_COLOURS[: len(parts)], _REST], strict=True
    ):
        bars = axes.bar(range(len(plans)), values, 0.72, bottom=below, color=colour)
        for bar, plan in zip(bars, plans, strict=True):
            bar.set_alpha(1.0 if plan.fits else _PALE)
        below += values
    limit = plans[0].room.limit("device")
    if limit:
        axes.axhline(limit / GIB, color=INK, linewidth=1, linestyle="--")
        axes.text(1.005, limit / GIB, "limit", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    top = max(float(below.max()), limit / GIB if limit else 0)
    axes.set_ylim(0, 1.4 * top)
    for place, label in enumerate(_changes(plans)):
        size = max(5.5, min(7.5, 60 / len(plans)))
        axes.text(place, 1.015 * top, label, ha="center", va="bottom", fontsize=size, color=INK)
    handles = [
        Patch(color=colour, label=name)
        for name, colour in [*zip(largest, _COLOURS, strict=False), ("the rest", _REST)]
    ]
    if not all(plan.fits for plan in plans):
        handles.append(Patch(color=_COLOURS[0], alpha=_PALE, label="pale: does not fit"))
    axes.legend(handles=handles, loc="upper left", ncols=4, fontsize=8, labelcolor=INK)


def _changes(plans: Sequence[Plan]) -> list[str]:
    """Of each plan the levers, and a tile without one, that are not as in the plan before it; of the first, levers."""
    found, before = list[str](), dict[str, str]()
    for number, plan in enumerate(plans):
        now = {"memory.tile": f"memory.tile = {plan.job.memory.tile}"}
        now |= {step.setting: setting(step) for step in plan.steps}
        new = [
            text
            for name, text in now.items()
            if before.get(name) != text and (number or any(step.setting == name for step in plan.steps))
        ]
        found.append("\n".join(text.partition(".")[2].replace('"', "") for text in new))
        before = now
    return found


def _draw_speed(axes: Axes, plans: Sequence[Plan]) -> None:
    fitting = [(place, plan) for place, plan in enumerate(plans) if plan.fits]
    if not fitting:
        axes.text(0.5, 0.5, "nothing fits", transform=axes.transAxes, ha="center", color=MUTED)
        axes.set_yticks([])
        return
    rates = [plan.seconds.tokens_per_second(plan.job) for _, plan in fitting]
    axes.plot([place for place, _ in fitting], rates, color=AFTER, marker="o", markersize=5)
    for place, plan in enumerate(plans):
        if not plan.fits:
            axes.text(place, 0, "does not fit", ha="center", va="bottom", fontsize=8, color=MUTED)
    axes.set_ylim(0, 1.15 * max(rates))
    axes.yaxis.set_major_formatter(FuncFormatter(short_number))
