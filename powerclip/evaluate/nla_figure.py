"""The approximation study as a figure: losses beside the exact ones, then r and bias over α."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from powerclip.report.heatmaps import FAINT, INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from powerclip.evaluate.nla_agreement import AgreementGrid, Point

SHADES = ("#440154", "#3b528b", "#21918c", "#5ec962", "#d4b106")  # from α = 0 to α = 1
STYLES = ("-", "--", ":")  # τ from the largest to the smallest


def nla_figure(grids: Sequence[AgreementGrid]) -> Figure:
    """A line of panels for each source: losses at the smallest τ; r of R2T and of the loss, and the loss's bias."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.4 * len(grids)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(len(grids), 1, squeeze=False)[:, 0]
    for part, grid in zip(parts, grids, strict=True):
        part.suptitle(_short(grid.source), fontsize=10, fontweight="bold", color=INK)
        scatter, *lines = part.subplots(1, 4)
        _scatter(scatter, grid)
        _over_alpha(lines[0], grid, "R2T: Pearson r", lambda point: point.r2t.r)
        _over_alpha(lines[1], grid, "loss: Pearson r", lambda point: point.loss.r)
        _over_alpha(lines[2], grid, "loss: bias / standard deviation", lambda point: point.loss.bias)
        lines[2].legend(frameon=False, fontsize=8)
    # One scale of r for all sources, so that they can be compared.
    for column in (1, 2):
        shared = [part.axes[column] for part in parts]
        lowest = min(axes.get_ylim()[0] for axes in shared)
        for axes in shared:
            axes.set_ylim(lowest, 1 + (1 - lowest) / 20)
    return figure


def _scatter(axes: Any, grid: AgreementGrid) -> None:
    tau = _values(point.tau for point in grid.points)[-1]
    for alpha, shade in zip(_values(point.alpha for point in grid.points), SHADES, strict=True):
        r = grid.at(tau, alpha).loss.r
        label = f"α = {alpha:g}, r = {'–' if r is None else format(r, '.3f')}"
        axes.scatter(grid.exact, grid.approximate[tau, alpha], s=7, color=shade, alpha=0.6, label=label, lw=0)
    ends = [grid.exact.min().item(), grid.exact.max().item()]
    axes.plot(ends, ends, color=FAINT, lw=0.8)
    axes.set_title(f"losses of pairs, τ = {tau:g}", fontsize=9, color=INK)
    axes.set_xlabel("exact", fontsize=8)
    axes.set_ylabel("approximated", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(frameon=False, fontsize=7)


def _over_alpha(axes: Any, grid: AgreementGrid, title: str, value: Callable[[Point], float | None]) -> None:
    alphas = _values(point.alpha for point in grid.points)
    for tau, style in zip(_values(point.tau for point in grid.points), STYLES, strict=True):
        values = [value(grid.at(tau, alpha)) for alpha in alphas]
        shown = [float("nan") if number is None else number for number in values]
        axes.plot(alphas, shown, style, color=INK, marker="o", markersize=3, label=f"τ = {tau:g}")
    axes.set_title(title, fontsize=9, color=INK)
    axes.set_xlabel("α", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(color="#e5e7eb", lw=0.6)


def _values(values: Iterable[float]) -> list[float]:
    """Each value once, in their order."""
    return list(dict.fromkeys(values))


def _short(source: str, limit: int = 90) -> str:
    """The end of a long path, which is what tells models apart."""
    return source if len(source) <= limit else f"…{source[-limit:]}"
