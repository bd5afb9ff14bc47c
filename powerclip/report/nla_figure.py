"""The approximation study as a figure: losses beside the exact ones, then r and bias over α."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powerclip.evaluate.nla_agreement import ALPHAS, TAUS, Agreement, Point, Study
from powerclip.report.heatmaps import FAINT, INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHADES = ("#440154", "#3b528b", "#21918c", "#5ec962", "#d4b106")  # from α = 0 to α = 1
STYLES = ("-", "--", ":")  # τ from the largest to the smallest


def nla_figure(studies: Sequence[Study]) -> Figure:
    """A line of panels for each source: losses at the smallest τ; r of R2T and of the loss, and the loss's bias."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.4 * len(studies)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(len(studies), 1, squeeze=False)[:, 0]
    for part, study in zip(parts, studies, strict=True):
        part.suptitle(_short(study.source), fontsize=10, fontweight="bold", color=INK)
        scatter, *lines = part.subplots(1, 4)
        _scatter(scatter, study, TAUS[-1])
        _over_alpha(lines[0], study, "R2T: Pearson r", lambda point: point.r2t.r)
        _over_alpha(lines[1], study, "loss: Pearson r", lambda point: point.loss.r)
        _over_alpha(lines[2], study, "loss: bias / standard deviation", lambda point: point.loss.bias)
        lines[2].legend(frameon=False, fontsize=8)
    # One scale of r for all sources: they are there to be compared.
    for column in (1, 2):
        shared = [part.axes[column] for part in parts]
        lowest = min(axes.get_ylim()[0] for axes in shared)
        for axes in shared:
            axes.set_ylim(lowest, 1 + (1 - lowest) / 20)
    return figure


def _scatter(axes: Any, study: Study, tau: float) -> None:
    for alpha, shade in zip(ALPHAS, SHADES, strict=True):
        part: Agreement = study.at(tau, alpha).loss
        label = f"α = {alpha:g}, r = {'–' if part.r is None else format(part.r, '.3f')}"
        axes.scatter(study.exact, study.approximate[tau, alpha], s=7, color=shade, alpha=0.6, label=label, lw=0)
    ends = [study.exact.min().item(), study.exact.max().item()]
    axes.plot(ends, ends, color=FAINT, lw=0.8)
    axes.set_title(f"losses of pairs, τ = {tau:g}", fontsize=9, color=INK)
    axes.set_xlabel("exact", fontsize=8)
    axes.set_ylabel("approximated", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(frameon=False, fontsize=7)


def _over_alpha(axes: Any, study: Study, title: str, value: Any) -> None:
    for tau, style in zip(TAUS, STYLES, strict=True):
        points: list[Point] = [study.at(tau, alpha) for alpha in ALPHAS]
        shown = [float("nan") if (found := value(point)) is None else found for point in points]
        axes.plot(ALPHAS, shown, style, color=INK, marker="o", markersize=3, label=f"τ = {tau:g}")
    axes.set_title(title, fontsize=9, color=INK)
    axes.set_xlabel("α", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(color="#e5e7eb", lw=0.6)


def _short(source: str, most: int = 90) -> str:
    """The end of a long path, which is what tells models apart."""
    return source if len(source) <= most else f"…{source[-most:]}"
