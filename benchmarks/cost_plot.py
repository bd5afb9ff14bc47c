"""The figures of a step's cost: time and memory over M, and the methods beside CLIP, with what the paper reports.

Reads what `cost.py`, `alignment.py`, `step.py` and `methods.py` write; `python benchmarks/cost.py --from …` draws it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from powerclip.errors import UserError
from powerclip.report.heatmaps import FAINT, INK
from powerclip.report.table import Table, fixed

PALETTE = ("#c2571a", "#d69a3c", "#1f5fbf", "#2a8a4a", "#8a3fa0", "#147d8c", "#6b6f76")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BAR, PAPER = "#a9c4ec", "#b0460f"


@dataclass(frozen=True)
class Curves:
    """Time and memory against M, a line for each variant of the loss."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, float, float | None]]]  # M, ms, GiB
    level: tuple[str, float, float | None] | None = None  # one that does not depend on M: name, ms, GiB


@dataclass(frozen=True)
class Bar:
    """A step's time relative to CLIP's."""

    name: str
    relative: float
    smallest: float
    largest: float
    paper: float | None = None


@dataclass(frozen=True)
class Bars:
    """Several of them."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Cost:
    """What the figure shows."""

    curves: tuple[Curves, ...] = ()
    bars: tuple[Bars, ...] = ()


def cost_figure(cost: Cost) -> Figure:
    """A line of panels for each measurement: curves of time and memory, or bars."""
    heights = [3.6] * len(cost.curves) + [0.7 + 0.3 * len(bars.bars) + 0.6 for bars in cost.bars]
    figure = Figure(figsize=(9.5, sum(heights)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.add_gridspec(len(heights), 2, height_ratios=heights)
    for row, curves in enumerate(cost.curves):
        left, right = figure.add_subplot(grid[row, 0]), figure.add_subplot(grid[row, 1])
        _draw_curves(left, curves, 1, "ms")
        if not _draw_curves(right, curves, 2, "GiB, peak of a step above weights and optimiser"):
            right.set_visible(False)
        left.legend(frameon=False, fontsize=8)
    for row, bars in enumerate(cost.bars, len(cost.curves)):
        _draw_bars(figure.add_subplot(grid[row, :]), bars)
    return figure


def _draw_curves(axes: Any, curves: Curves, column: int, label: str) -> bool:
    """Draw one quantity against M; whether there was anything to draw."""
    drawn = False
    for number, (name, line) in enumerate(curves.lines.items()):
        points = [(point[0], point[column]) for point in line if point[column] is not None]
        if points:
            # Every second line dashed and hollow: where two coincide, both are seen.
            style = {"ls": "--", "markerfacecolor": "white", "zorder": 3} if number % 2 else {}
            colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]
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


def _draw_bars(axes: Any, bars: Bars) -> None:
    names = [bar.name for bar in bars.bars]
    positions = range(len(names))
    values = [bar.relative for bar in bars.bars]
    below = [max(0.0, bar.relative - bar.smallest) for bar in bars.bars]
    above = [max(0.0, bar.largest - bar.relative) for bar in bars.bars]
    axes.barh(positions, values, height=0.62, color=BAR, xerr=(below, above), ecolor=INK, capsize=2, error_kw={"lw": 1})
    _draw_paper(axes, bars, positions)
    for position, bar in zip(positions, bars.bars, strict=True):
        beside = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{bar.relative:.2f}", (0, position), color=INK, fontweight="bold", **beside)
    axes.axvline(1, color=FAINT, lw=0.8, ls="--")
    axes.set_yticks(positions, names)
    axes.invert_yaxis()
    axes.set_xlabel("× CLIP", fontsize=8)
    axes.set_title(bars.title, fontsize=9, color=INK, loc="left")
    axes.margins(x=0.08)
    _plain(axes, grid="x")


def _draw_paper(axes: Any, bars: Bars, positions: Sequence[int]) -> None:
    printed = [
        (bar.paper, position) for bar, position in zip(bars.bars, positions, strict=True) if bar.paper is not None
    ]
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


def read_cost(path: Path) -> Cost:
    """The measurements in a result of `cost.py`, `alignment.py`, `step.py` or `methods.py`.

    Raises:
        UserError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    return from_content(content, str(path))


def from_content(content: Any, where: str) -> Cost:
    """What a file's content shows; `where` is what messages call it."""
    wrong = UserError(f"{where}: no measurement of cost, as cost.py, alignment.py, step.py or methods.py write it")
    if not isinstance(content, Mapping):
        raise wrong
    try:
        if "steps" in content and "methods" in content:
            return _over_regions(content)
        rows, machine = content["rows"], str(content["origin"]["machine"])
        if "method" in rows[0]:
            return Cost(bars=(Bars(f"A step beside CLIP's\n{content['about']}\n{machine}", _read_bars(rows)),))
        if "sweep" in rows[0]:
            return Cost(curves=(_scoring(rows, machine),))
        return Cost(bars=(_steps(rows, machine),))
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        raise wrong from None


def _over_regions(content: Mapping[str, Any]) -> Cost:
    lines: dict[str, list[tuple[int, float, float | None]]] = {}
    level = None
    for row in content["steps"]:
        if row["ms"] is None:
            continue
        if row["M"] is None:
            level = (row["variant"], row["ms"], row["gib"])
        else:
            lines.setdefault(row["variant"], []).append((int(row["M"]), float(row["ms"]), row["gib"]))
    machine = content.get("origin", content)["machine"]
    about = f"{content['pairs']} pairs, {content['nodes']} nodes\n{machine}"
    return Cost(
        (Curves(f"A training step, {about}", lines, level),),
        (Bars(f"A step beside CLIP's, {about}", _read_bars(content["methods"])),),
    )


def _read_bars(rows: Sequence[Mapping[str, Any]]) -> tuple[Bar, ...]:
    if not rows:
        raise ValueError("no method was measured")
    return tuple(
        Bar(row["method"], float(row["relative"]), float(row["smallest"]), float(row["largest"]), row.get("paper"))
        for row in rows
    )


def _scoring(rows: Sequence[Mapping[str, Any]], machine: str) -> Curves:
    """`benchmarks/alignment.py`: scoring all pairs, without the towers."""
    lines: dict[str, list[tuple[int, float, float | None]]] = {}
    swept = [row for row in rows if row["sweep"] == "M" and row["ms"] is not None and row["what"] != "monte carlo"]
    for row in swept:
        name = f"{row['what']}, {row['backend']}" + (" (bf16)" if row["dtype"] == "bfloat16" else "")
        lines.setdefault(name, []).append((row["size"]["regions"], row["ms"], row["gib"]))
    size = swept[0]["size"]
    return Curves(f"Scoring {size['images']} images × {size['captions']} captions\n{machine}", lines)


def _steps(rows: Sequence[Mapping[str, Any]], machine: str) -> Bars:
    """`benchmarks/step.py`: whole steps in several settings."""
    clip = next((row["ms"] for row in rows if row["name"] == "our CLIP"), None) or rows[0]["ms"]
    shown = [row for row in rows if row["ms"] is not None]
    if not shown:
        raise ValueError("no step was measured")
    bars = [(row["name"], row["ms"], row.get("spread") or 0.0) for row in shown]
    return Bars(
        f"A training step beside our CLIP's\n{machine}",
        tuple(Bar(name, ms / clip, (ms - spread) / clip, (ms + spread) / clip) for name, ms, spread in bars),
    )


def merge(costs: Sequence[Cost]) -> Cost:
    """All of them in one figure."""
    return Cost(
        tuple(curves for cost in costs for curves in cost.curves),
        tuple(bars for cost in costs for bars in cost.bars),
    )


def tables(cost: Cost) -> list[Table]:
    """The numbers of the figure: ms over M, and times relative to CLIP's."""
    all_tables = []
    for curves in cost.curves:
        counts = sorted({count for line in curves.lines.values() for count, _, _ in line})
        rows: list[list[object]] = []
        for name, line in curves.lines.items():
            times = {count: ms for count, ms, _ in line}
            rows.append([name, *(fixed(times.get(count)) for count in counts)])
        if curves.level:
            rows.append([f"{curves.level[0]} alone", *[fixed(curves.level[1])] * len(counts)])
        table = Table.plain(["ms", *(f"M = {count}" for count in counts)], rows)
        all_tables.append(replace(table, title=curves.title.replace("\n", ", ")))
    for bars in cost.bars:
        rows = [
            [bar.name, *(fixed(value, 2) for value in (bar.relative, bar.smallest, bar.largest, bar.paper))]
            for bar in bars.bars
        ]
        table = Table.plain(["", "× CLIP", "smallest", "largest", "paper, of an epoch"], rows)
        all_tables.append(replace(table, title=bars.title.replace("\n", ", ")))
    return all_tables
