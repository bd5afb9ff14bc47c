"""The training curves of a study as one self-contained page: a line for each setting, the mean over its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from powerclip.report.charts import Curve, line_chart
from powerclip.report.page import html_page

Log = Sequence[Mapping[str, float]]  # the rows that a run has logged, each with its step

CHARTS = {
    "clip": "CLIP loss",
    "alignment": "Alignment loss",
    "local": "Local loss",
    "simclr": "SimCLR loss",
    "byol": "BYOL loss",
    "violation": "Violation rate",
    "empty": "Empty best sets",
    "logit_scale": "Logit scale",
    "evaluate/retrieval/mean_recall": "Retrieval",
}
# Neighbours differ most; a study with more settings uses the colours again.
PALETTE = (
    "#c2571a", "#1f5fbf", "#2a8a4a", "#8a3fa0", "#b58900", "#d1306b", "#147d8c", "#6b6f76", "#7a4a21", "#4b3fd1"
)  # fmt: skip


def curves_page(logs: Mapping[str, Sequence[Log]]) -> str:
    """The page as HTML, from the logs of each setting's runs."""
    colours = {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(logs)}
    charts = []
    for key, title in CHARTS.items():
        series = {name: line for name, runs in logs.items() if (line := _mean_curve(runs, key))}
        if any(len(line) > 1 for line in series.values()):  # an evaluation at the end alone is in the table
            charts.append(line_chart(title, series, colours, legend=False))
    names = " ".join(
        f'<span class="whole" style="color:{colour}">■ {escape(name)}</span>' for name, colour in colours.items()
    )
    drawn = "".join(f"<div>{chart}</div>" for chart in charts)
    return html_page("Training curves", f'<h1>Training curves</h1>\n<p>{names}</p>\n<div class="charts">{drawn}</div>')


def _mean_curve(runs: Sequence[Log], key: str) -> Curve:
    """(step, mean over the runs that logged it there)."""
    logged: dict[float, list[float]] = {}
    for rows in runs:
        for row in rows:
            if key in row:
                logged.setdefault(row["step"], []).append(row[key])
    return [(step, sum(values) / len(values)) for step, values in sorted(logged.items())]
