"""A radar plot: methods on many axes, each axis scaled by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerclip.report.heatmaps import FAINT, INK
from powerclip.report.table import fixed
from powerclip.runtime.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
COLOURS = ("#8a8f98", "#1f5fbf", "#c2571a", "#2a8a4a", "#8a3fa0", "#b58900", "#d1306b", "#147d8c")


def save_radar(axes: Sequence[str], series: Mapping[str, Sequence[float | None]], path: Path, digits: int = 1) -> None:
    """Write the figure of `radar_figure` in the format that the path's name ends in."""
    buffer = BytesIO()
    radar_figure(axes, series, digits).savefig(buffer, format=path.suffix.lstrip(".").lower())
    write_atomic(path, buffer.getvalue())


def radar_figure(axes: Sequence[str], series: Mapping[str, Sequence[float | None]], digits: int = 1) -> Figure:
    """A closed line for each of the series; an axis ends at the highest value on it, which is written beside its name.

    The middle is 0 on every axis. Where a value is missing the line has a gap.

    Args:
        axes: their names.
        series: name → values, one for each axis.
        digits: decimals of the highest values.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9.6), dpi=100)
    FigureCanvasAgg(figure)
    plot: Any = figure.add_axes((0.18, 0.2, 0.64, 0.64 * 9 / 9.6), projection="polar")
    plot.set_theta_zero_location("N")
    plot.set_theta_direction(-1)
    angles = [2 * math.pi * number / len(axes) for number in range(len(axes))]
    highest = [max((row[k] or 0 for row in series.values()), default=0) for k in range(len(axes))]
    for number, (name, row) in enumerate(series.items()):
        radii = [
            math.nan if value is None else value / most if most > 0 else 0
            for value, most in zip(row, highest, strict=True)
        ]
        colour = COLOURS[number % len(COLOURS)]
        plot.plot([*angles, angles[0]], [*radii, radii[0]], color=colour, lw=1.6, marker="o", markersize=3, label=name)
    plot.set_ylim(0, 1.02)
    plot.set_yticks([0.25, 0.5, 0.75, 1.0], labels=["", "50 %", "", "best"], fontsize=6.5, color=FAINT)
    plot.set_rlabel_position(360 / len(axes) / 2)
    plot.set_xticks(angles, labels=[])
    plot.grid(color="#e5e7eb", lw=0.6)
    plot.spines["polar"].set_color("#e5e7eb")
    for angle, name, most in zip(angles, axes, highest, strict=True):
        _label(plot, angle, f"{name} {fixed(most, digits)}")
    figure.legend(loc="lower center", ncols=min(4, len(series)), frameon=False, fontsize=9)
    return figure


def _label(plot: Any, angle: float, text: str) -> None:
    """A text that points outwards and is never upside down."""
    degrees = 90 - math.degrees(angle)
    left = math.pi < angle < 2 * math.pi
    plot.text(
        angle,
        1.06,
        text,
        rotation=degrees + 180 if left else degrees,
        rotation_mode="anchor",
        ha="right" if left else "left",
        va="center",
        fontsize=8,
        color=INK,
    )
