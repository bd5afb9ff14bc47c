"""The cost figures: time and memory over M, and bars of the methods with what the paper reports beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powerclip.report.heatmaps import FAINT, INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from powerclip.analysis.cost import Bars, Cost, Curves

PALETTE = ("#c2571a", "#d69a3c", "#1f5fbf", "#2a8a4a", "#8a3fa0", "#147d8c", "#6b6f76")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BAR, PAPER = "#a9c4ec", "#b0460f"


def cost_figure(cost: Cost) -> Figure:
    """A line of panels for each measurement: curves of time and memory, or bars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [3.6] * len(cost.curves) + [0.7 + 0.3 * len(bars.bars) + 0.6 for bars in cost.bars]
    figure = Figure(figsize=(9.5, sum(heights)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for place, curves in enumerate(cost.curves):
        left, right = figure.add_subplot(grid[place, 0]), figure.add_subplot(grid[place, 1])
        _curves(left, curves, 1, "ms")
        if not _curves(right, curves, 2, "GiB, peak of a step above weights and optimiser"):
            right.set_visible(False)
        left.legend(frameon=False, fontsize=8)
    for place, bars in enumerate(cost.bars, len(cost.curves)):
        _bars(figure.add_subplot(grid[place, :]), bars)
    return figure


def _curves(axes: Any, curves: Curves, column: int, label: str) -> bool:
    """Draw one quantity against M; whether there was anything to draw."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    drawn = False
    for place, (name, line) in enumerate(curves.lines.items()):
        points = [(point[0], point[column]) for point in line if point[column] is not None]
        if points:
            # Every second line dashed and hollow: where two coincide, both are seen.
            style = {"ls": "--", "markerfacecolor": "white", "zorder": 3} if place % 2 else {}
            colour, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
            axes.plot(
                *zip(*points, strict=True), marker=marker, markersize=5, lw=1.4, color=colour, label=name, **style
            )
            drawn = True
    if curves.level is not None and curves.level[column] is not None:
        axes.axhline(curves.level[column], color=FAINT, lw=1, ls=":", label=f"{curves.level[0]} alone")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("regions M", fontsize=8)
    axes.set_ylabel(label, fontsize=8)
    if column == 1:
        axes.set_title(curves.title, fontsize=9, color=INK, loc="left")
    _plain(axes)
    return drawn


def _bars(axes: Any, bars: Bars) -> None:
    names = [bar.name for bar in bars.bars]
    places = range(len(names))
    values = [bar.relative for bar in bars.bars]
    below = [max(0.0, bar.relative - bar.smallest) for bar in bars.bars]
    above = [max(0.0, bar.largest - bar.relative) for bar in bars.bars]
    axes.barh(places, values, height=0.62, color=BAR, xerr=(below, above), ecolor=INK, capsize=2, error_kw={"lw": 1})
    _paper(axes, bars, places)
    for place, bar in zip(places, bars.bars, strict=True):
        beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{bar.relative:.2f}", (0, place), color=INK, fontweight="bold", **beside)
    axes.axvline(1, color=FAINT, lw=0.8, ls="--")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("× CLIP", fontsize=8)
    axes.set_title(bars.title, fontsize=9, color=INK, loc="left")
    axes.margins(x=0.08)
    _plain(axes, grid="x")


def _paper(axes: Any, bars: Bars, places: Sequence[int]) -> None:
    printed = [(bar.paper, place) for bar, place in zip(bars.bars, places, strict=True) if bar.paper is not None]
    if printed:
        values, rows = zip(*printed, strict=True)
        axes.scatter(values, rows, marker="D", s=26, color=PAPER, zorder=3, label="the paper, of an epoch")
        for value, row in printed:
            axes.annotate(
                f"{value:.2f}", (value, row), (7, 0), textcoords="offset points", va="center", fontsize=8, color=PAPER
            )
        axes.legend(frameon=False, fontsize=8, loc="upper right")


def _plain(axes: Any, grid: str = "both") -> None:
    axes.grid(axis=grid, color="#e5e7eb", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
