"""Line charts as inline SVG: small, sharp at any size, and free of outside resources."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Curve = Sequence[tuple[float, float]]  # (x, y)

WIDTH, HEIGHT = 360, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 30, 34


def line_chart(
    title: str,
    series: Mapping[str, Curve],
    colours: Mapping[str, str],
    horizontal: str = "step",
    legend: bool = True,
) -> str:
    """An SVG chart of (x, y) points, one line per name. Points that are not finite leave a gap.

    Without `legend` the names are left to the page: above the plot there is room for two or three.
    """
    points = [point for line in series.values() for point in line if math.isfinite(point[1])]
    if not points:
        return ""
    x_low, x_high = _widen(min(x for x, _ in points), max(x for x, _ in points))
    y_low, y_high = _widen(min(0.0, *(y for _, y in points)), max(y for _, y in points))
    step = _step(y_low, y_high)
    if -y_high % step < step / 2:  # so that the highest rule lies above the line
        y_high += -y_high % step

    def position(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return across, down

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" class="chart">',
        f'<text x="{LEFT}" y="16" class="title">{escape(title)}</text>',
    ]
    for value in _ticks(y_low, y_high):
        _, down = position(x_low, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}" class="rule"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 3.5:.1f}" class="tick end">{value:g}</text>')
    for value in _ticks(x_low, x_high):
        across, _ = position(value, y_low)
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 16}" class="tick mid">{value:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" class="tick end">{escape(horizontal)}</text>')
    for name, line in series.items():
        for run in _runs(line):
            path = " ".join(f"{across:.1f},{down:.1f}" for across, down in (position(x, y) for x, y in run))
            parts.append(f'<polyline points="{path}" class="line" stroke="{colours[name]}"/>')
    # Names at the right above the plot, from the last to the first.
    right = float(WIDTH - RIGHT)
    for name in reversed(list(series) if legend else []):
        style = f"fill:{colours[name]}"
        parts.append(f'<text x="{right:.0f}" y="16" class="name end" style="{style}">{escape(name)}</text>')
        right -= 7.2 * len(name) + 4
        parts.append(
            f'<line x1="{right - 10:.0f}" x2="{right:.0f}" y1="12" y2="12" class="line" stroke="{colours[name]}"/>'
        )
        right -= 22
    return "".join([*parts, "</svg>"])


def smooth(line: Curve, window: int) -> list[tuple[float, float]]:
    """A running mean over the last `window` points, for curves that are too noisy to read."""
    averaged = []
    for index, (x, _) in enumerate(line):
        recent = [y for _, y in line[max(0, index - window + 1) : index + 1]]
        averaged.append((x, sum(recent) / len(recent)))
    return averaged


def _widen(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low, low + 1.0)


def _step(low: float, high: float) -> float:
    """A round distance between ticks that gives about five of them."""
    rough = (high - low) / 4
    power: float = 10 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * 1.5 >= rough)


def _ticks(low: float, high: float) -> list[float]:
    """The round numbers from `low` to `high`."""
    step = _step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def _runs(line: Curve) -> list[list[tuple[float, float]]]:
    """The line cut where a value is not finite."""
    runs: list[list[tuple[float, float]]] = [[]]
    for point in line:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
