"""How figures are drawn: one style, two widths, and SVG whose colours follow the page's scheme."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Each colour stands for one thing; inside the page it follows the light or dark scheme. Blue and orange after
# Okabe and Ito, whom the common kinds of colour blindness spare; shape and dash repeat the difference.
INK, MUTED, GRID = "#1d2530", "#5a6472", "#dde2e8"
BEFORE, AFTER, CONTROL = "#7b8794", "#0070b4", "#cf5200"
_PAPER = "#ffffff"
_VARIABLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    BEFORE: "before",
    AFTER: "after",
    CONTROL: "control",
}

_RC: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "figure.facecolor": _PAPER,
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "longstrand",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.borderpad": 0,
    "lines.linewidth": 2,
    "path.simplify": True,
    "hatch.linewidth": 0.8,
}
_CURVE_POINTS = 400


@dataclass(frozen=True)
class Plot:
    """One figure in two widths, so that its text stays readable on a phone; the PNG is the wide one."""

    name: str
    wide_svg: str
    narrow_svg: str
    png: bytes


def render(
    name: str, draw: Callable[[Figure, bool], None], wide: tuple[float, float], narrow: tuple[float, float]
) -> Plot:
    """Draws a figure at both sizes (inches); `draw` is told whether it is the narrow one."""
    wide_svg, png = draw_figure(lambda figure: draw(figure, False), wide)
    narrow_svg, _ = draw_figure(lambda figure: draw(figure, True), narrow, with_png=False)
    return Plot(name, wide_svg, narrow_svg, png)


def draw_figure(
    draw: Callable[[Figure], None], size: tuple[float, float], *, with_png: bool = True
) -> tuple[str, bytes]:
    """A figure of one size (inches) as an SVG, and as a PNG of the same layout."""
    svg, png = io.BytesIO(), io.BytesIO()
    with mpl.rc_context(_RC):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})
        if with_png:
            figure.set_layout_engine("none")
            figure.set_dpi(200)
            FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
    return svg.getvalue().decode(), png.getvalue()


def inline_svg(svg: str, label: str, prefix: str) -> str:
    """The SVG as a part of the page: colours as the page's variables, ids of its own, a spoken label."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    svg = svg.replace(f"fill: {_PAPER}", "fill: none")
    svg = re.sub(r'(?<=\bid=")|(?<=url\(#)|(?<=href="#)', f"{prefix}-", svg)
    svg = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", svg)
    svg = re.sub(r'^<svg([^>]*?) height="[^"]*"', r"<svg\1", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(label, quote=True)}"', 1)


def draw_curve(axes: Axes, steps: list[int], values: list[float], colour: str, label: str | None) -> None:
    """Every value for a short run; for a long one the mean of each stretch, with its range behind."""
    if len(steps) <= _CURVE_POINTS:
        marker = "o" if len(steps) < 40 else None
        axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=4, label=label)
        return
    cuts = np.array_split(np.arange(len(steps)), _CURVE_POINTS)
    middle = [float(np.mean([steps[cut[0]], steps[cut[-1]]])) for cut in cuts]
    array = np.array(values)
    axes.fill_between(
        middle,
        [array[cut].min() for cut in cuts],
        [array[cut].max() for cut in cuts],
        color=colour,
        alpha=0.22,
        linewidth=0,
        label=f"{label}: range of {len(cuts[0])} steps" if label else None,
    )
    axes.plot(
        middle,
        [array[cut].mean() for cut in cuts],
        color=colour,
        linewidth=1.6,
        label=f"{label}: mean of {len(cuts[0])} steps" if label else None,
    )


def integer_steps(axes: Axes, steps: list[int]) -> None:
    """Whole steps on the horizontal axis, at most five of them; one step stands alone in the middle."""
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if len(steps) == 1:
        axes.set_xticks(steps)
        axes.set_xlim(steps[0] - 1, steps[0] + 1)


def short_number(value: float, _: int) -> str:
    """A tick's label."""
    if value == 0:
        return "0"
    if abs(value) >= 1e9:
        return f"{value:.1e}"
    if abs(value) >= 10000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.4g}" if abs(value) >= 1e-4 else f"{value:.1e}"
