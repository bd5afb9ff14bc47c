"""The approximation study as figures: an overview, the losses (the paper's Figure 5) and the scores (its Figure 7)."""

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
        tau = min(point.tau for point in grid.points)
        _scatter(scatter, grid, "loss", tau)
        scatter.set_title(f"losses of pairs, τ = {tau:g}", fontsize=9, color=INK)
        _over_alpha(lines[0], grid, "R2T: Pearson r", lambda point: point.r2t.r)
        _over_alpha(lines[1], grid, "loss: Pearson r", lambda point: point.loss.r)
        _over_alpha(lines[2], grid, "loss: bias / standard deviation", lambda point: point.loss.bias)
        lines[2].legend(frameon=False, fontsize=8)
    # One scale of r for all sources, so that they can be compared.
    for column in (1, 2):
        _share_scale(part.axes[column] for part in parts)
    return figure


def losses_figure(grids: Sequence[AgreementGrid]) -> Figure:
    """Figure 5: both terms of the loss beside the exact ones, a column for each τ, then Pearson's r over α."""
    figure, parts = _parts(grids, lines=3)
    for part, grid in zip(parts, grids, strict=True):
        taus = _values(point.tau for point in grid.points)
        axes = part.subplots(3, len(taus), squeeze=False)
        for column, tau in enumerate(taus):
            for line, (name, term) in enumerate((("rows", "Φ(Q)"), ("columns", "Φ(Qᵀ)"))):
                _scatter(axes[line, column], grid, name, tau)
                axes[line, column].set_title(f"{term}, τ = {tau:g}", fontsize=9, color=INK)
            _rates(axes[2, column], grid, tau)
        _share_scale(axes[2])
    return figure


def scores_figure(grids: Sequence[AgreementGrid]) -> Figure:
    """Figure 7: NLA-T1 beside the exact T2R and NLA-T2 beside the exact R2T, a column for each τ."""
    figure, parts = _parts(grids, lines=2)
    for part, grid in zip(parts, grids, strict=True):
        taus = _values(point.tau for point in grid.points)
        axes = part.subplots(2, len(taus), squeeze=False)
        for column, tau in enumerate(taus):
            # NLA-T1 does not know α: one is as good as another.
            _scatter(axes[0, column], grid, "t2r", tau, alphas=[grid.points[0].alpha], shades=[INK])
            axes[0, column].set_title(f"NLA-T1 and T2R, τ = {tau:g}", fontsize=9, color=INK)
            _scatter(axes[1, column], grid, "r2t", tau)
            axes[1, column].set_title(f"NLA-T2 and R2T, τ = {tau:g}", fontsize=9, color=INK)
    return figure


def _parts(grids: Sequence[AgreementGrid], lines: int) -> tuple[Figure, Any]:
    """A figure with a part of so many lines of panels for each source."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, (3.1 * lines + 0.4) * len(grids)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(len(grids), 1, squeeze=False)[:, 0]
    for part, grid in zip(parts, grids, strict=True):
        part.suptitle(_short(grid.source), fontsize=10, fontweight="bold", color=INK)
    return figure, parts


def _scatter(
    axes: Any,
    grid: AgreementGrid,
    name: str,
    tau: float,
    alphas: Sequence[float] | None = None,
    shades: Sequence[str] = SHADES,
) -> None:
    """Approximated values beside the exact ones, with Pearson's r of each α."""
    exact = grid.exact[name]
    chosen = _values(point.alpha for point in grid.points) if alphas is None else alphas
    for alpha, shade in zip(chosen, shades, strict=True):
        r = getattr(grid.at(tau, alpha), name).r
        shown = f"r = {'–' if r is None else format(r, '.3f')}"
        label = shown if alphas is not None else f"α = {alpha:g}, {shown}"
        axes.scatter(exact, grid.approximate[tau, alpha][name], s=7, color=shade, alpha=0.6, label=label, lw=0)
    ends = [exact.min().item(), exact.max().item()]
    axes.plot(ends, ends, color=FAINT, lw=0.8)
    axes.set_xlabel("exact", fontsize=8)
    axes.set_ylabel("approximated", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(frameon=False, fontsize=7)


def _rates(axes: Any, grid: AgreementGrid, tau: float) -> None:
    """Pearson's r over α of both terms of the loss."""
    alphas = _values(point.alpha for point in grid.points)
    for name, term, style in (("rows", "Φ(Q)", "-"), ("columns", "Φ(Qᵀ)", "--")):
        values = [getattr(grid.at(tau, alpha), name).r for alpha in alphas]
        shown = [float("nan") if value is None else value for value in values]
        axes.plot(alphas, shown, style, color=INK, marker="o", markersize=3, label=term)
    axes.set_title(f"Pearson r, τ = {tau:g}", fontsize=9, color=INK)
    axes.set_xlabel("α", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(color="#e5e7eb", lw=0.6)
    axes.legend(frameon=False, fontsize=7)


def _share_scale(axes: Iterable[Any]) -> None:
    """One scale of r for all panels, up to 1."""
    panels = list(axes)
    lowest = min(panel.get_ylim()[0] for panel in panels)
    for panel in panels:
        panel.set_ylim(lowest, 1 + (1 - lowest) / 20)


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
