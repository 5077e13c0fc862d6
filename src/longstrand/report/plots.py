"""The figures of a report: loss by position, the loss curve, and the run step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from longstrand.buckets import Comparison, Gain
from longstrand.report.drawing import (
    AFTER,
    BEFORE,
    CONTROL,
    INK,
    Plot,
    draw_curve,
    integer_steps,
    render,
    short_number,
)
from longstrand.report.findings import Findings
from longstrand.report.run_folder import RunFolder
from longstrand.series import Series
from longstrand.wording import Unit, short_tokens


def plot_positions(run: RunFolder, findings: Findings, unit: Unit) -> Plot | None:
    """Loss per bucket before, after and of the control, above the gains; None without an evaluation."""
    before, after, control = run.first("before"), run.last("after"), run.last("control after")
    drawn = [
        series for series in (before, after, control) if series is not None and series["nats"] is not None
    ]
    if not drawn:
        return None

    def draw(figure: Figure, narrow: bool) -> None:
        rows = 2 if findings.gain else 1
        ratios = [3, 2] if findings.gain else [1]
        axes = figure.subplots(rows, 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
        if before:
            _draw_series(axes[0], before, unit, "before", BEFORE, "o", "-")
        if after:
            _draw_series(axes[0], after, unit, "after", AFTER, "s", "-")
        if control:
            _draw_series(axes[0], control, unit, "control after (strangers)", CONTROL, "^", "--")
        axes[0].set_title(f"Held-out loss, {unit.name}")
        axes[0].legend(loc="best", ncols=1, labelcolor=INK)
        if findings.gain:
            _draw_gains(axes[1], findings.gain, findings.control)
        buckets = drawn[0]["buckets"]
        edges = [buckets[0]["start"], *(bucket["end"] for bucket in buckets)]
        _label_edges(axes[-1], edges, 5 if narrow else 9)

    return render("loss_by_position", draw, wide=(9.0, 5.6), narrow=(4.3, 5.6))


def plot_loss(run: RunFolder, unit: Unit) -> Plot | None:
    """Training loss over steps, with the held-out loss before and after; None before the first step."""
    steps, losses = run.column("loss")
    if not steps:
        return None

    def draw(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        draw_curve(axes, steps, [loss * unit.factor for loss in losses], AFTER, "training")
        for name, colour, marker in (("before", BEFORE, "o"), ("after", AFTER, "s")):
            points = [(s["step"], s["nats"] * unit.factor) for s in run.named(name) if s["nats"] is not None]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    marker,
                    color=colour,
                    markersize=8,
                    markeredgecolor=INK,
                    label=f"held-out, {name}",
                    clip_on=False,
                    zorder=4,
                )
        axes.set_title(f"Loss, {unit.name}")
        axes.set_xlabel("step")
        axes.legend(loc="best", labelcolor=INK)
        integer_steps(axes, steps)

    return render("loss_curve", draw, wide=(9.0, 3.6), narrow=(4.3, 3.6))


def plot_run(run: RunFolder) -> Plot | None:
    """Small panels of what else was recorded at each step; None where nothing was."""
    panels: list[tuple[str, str, float]] = [
        ("tokens_per_second", "Tokens per second", 1.0),
        ("peak_memory_bytes", "Peak memory, GiB", 2.0**-30),
        ("grad_norm", "Gradient norm", 1.0),
        ("lr", "Learning rate", 1.0),
        ("indexer_kl", "Indexer loss (KL), nats", 1.0),
        ("expert_load_max_over_mean", "Busiest expert over mean load", 1.0),
    ]
    present = [(title, scale, *run.column(key)) for key, title, scale in panels]
    present = [panel for panel in present if panel[2]]
    if not present:
        return None

    def draw(figure: Figure, narrow: bool) -> None:
        columns = 1 if narrow else 2
        grid = figure.subplots(math.ceil(len(present) / columns), columns, squeeze=False).ravel()
        for axes, (title, scale, steps, values) in zip(grid, present, strict=False):
            draw_curve(axes, steps, [value * scale for value in values], AFTER, None)
            axes.set_title(title)
            low, high = axes.get_ylim()
            if low > 0:
                axes.set_ylim(0, 1.12 * high)
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_major_formatter(FuncFormatter(short_number))
            integer_steps(axes, steps)
        for axes in grid[len(present) :]:
            axes.set_axis_off()

    wide_rows = math.ceil(len(present) / 2)
    return render("run", draw, wide=(9.0, 0.3 + 1.75 * wide_rows), narrow=(4.3, 0.3 + 1.75 * len(present)))


def _draw_series(
    axes: Axes, series: Series, unit: Unit, label: str, colour: str, marker: str, dash: str
) -> None:
    rows = [(b["nats"], b["low"], b["high"], b["sequences"]) for b in series["buckets"]]
    middle = np.arange(len(rows)) + 0.5
    mean, low, high = (
        np.array([np.nan if row[part] is None else row[part] for row in rows], dtype=float) * unit.factor
        for part in range(3)
    )
    known = np.array([row[3] > 1 for row in rows])
    axes.errorbar(
        middle[known],
        mean[known],
        yerr=[(mean - low)[known], (high - mean)[known]],
        fmt="none",
        ecolor=colour,
        elinewidth=1.4,
        capsize=3,
    )
    axes.plot(middle, mean, marker=marker, linestyle=dash, color=colour, markersize=6, label=label)


def _draw_gains(axes: Axes, gain: Comparison, control: Comparison | None) -> None:
    sets = [(gain.buckets, AFTER, "", "relatives")]
    if control is not None and len(control.buckets) == len(gain.buckets):
        sets.append((control.buckets, CONTROL, "////", "strangers (control)"))
    width = 0.7 / len(sets)
    for number, (gains, colour, hatch, label) in enumerate(sets):
        middle = np.arange(len(gains)) + 0.5 + (number - (len(sets) - 1) / 2) * width
        _draw_bars(axes, gains, middle, width, colour, hatch)
        axes.bar(
            [0], [0], 0, facecolor="none" if hatch else colour, edgecolor=colour, hatch=hatch, label=label
        )
    if len(sets) > 1:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.25 * (high - low))
        axes.legend(loc="upper left", ncols=2, labelcolor=INK)
    axes.axhline(0, color=INK, linewidth=0.9)
    axes.set_title("Gain: loss lower than before, %")
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _draw_bars(
    axes: Axes, gains: Sequence[Gain], middle: np.ndarray, width: float, colour: str, hatch: str
) -> None:
    for place, gain in zip(middle, gains, strict=True):
        if gain.relative is None:
            continue
        value, low, high = (
            100 * part for part in (gain.relative.value, gain.relative.low, gain.relative.high)
        )
        axes.bar(
            [place],
            [value],
            width * 0.92,
            facecolor="none" if hatch else colour,
            edgecolor=colour,
            hatch=hatch,
            linewidth=1.0,
        )
        if gain.sequences > 1:
            axes.errorbar(
                [place],
                [value],
                yerr=[[value - low], [high - value]],
                fmt="none",
                ecolor=INK,
                elinewidth=1.1,
                capsize=2.5,
            )


def _label_edges(axes: Axes, edges: list[int], most: int) -> None:
    """Bucket edges as ticks between the buckets; every second, fourth, ... where they would touch."""
    every = 1
    while (len(edges) - 1) / every > most:
        every *= 2
    places = list(range(0, len(edges), every))
    if places[-1] != len(edges) - 1:
        if len(edges) - 1 - places[-1] < every / 2 + 0.5:
            places.pop()
        places.append(len(edges) - 1)
    axes.set_xticks(places, [short_tokens(edges[place]) for place in places])
    axes.set_xlim(0, len(edges) - 1)
    axes.set_xlabel("tokens of context before the target")
