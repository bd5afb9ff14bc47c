"""The training curves of a study as one self-contained page: a line for each setting, the mean over its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from powerclip.report.charts import line_chart
from powerclip.report.quickstart_page import STYLE, Curve
from powerclip.train.metrics import read_metrics

CHARTS = {
    "clip": "CLIP loss",
    "alignment": "Alignment loss",
    "local": "Local loss",
    "simclr": "SimCLR loss",
    "byol": "BYOL loss",
    "violation": "Violation rate",
    "empty": "Empty best sets",
    "logit_scale": "Logit scale",
    "evaluate/retrieval/mean": "Retrieval",
}
# Told apart on white, neighbours most of all; a study with more settings begins again.
PALETTE = (
    "#c2571a", "#1f5fbf", "#2a8a4a", "#8a3fa0", "#b58900", "#d1306b", "#147d8c", "#6b6f76", "#7a4a21", "#4b3fd1"
)  # fmt: skip


def curves_page(logs: Mapping[str, Sequence[Path]]) -> str:
    """The page as HTML, from the `metrics.jsonl` files of each setting's seeds."""
    colours = {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(logs)}
    rows = {name: [list(read_metrics(path)) for path in paths] for name, paths in logs.items()}
    charts = []
    for key, title in CHARTS.items():
        series = {name: line for name, runs in rows.items() if (line := _mean_curve(runs, key))}
        if any(len(line) > 1 for line in series.values()):  # an evaluation at the end alone is in the table
            charts.append(line_chart(title, series, colours, legend=False))
    names = " ".join(
        f'<span class="whole" style="color:{colour}">■ {escape(name)}</span>' for name, colour in colours.items()
    )
    drawn = "".join(f"<div>{chart}</div>" for chart in charts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Curves</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main><h1>Training curves</h1><p>{names}</p>"
        f'<div class="charts">{drawn}</div></main></body></html>\n'
    )


def _mean_curve(runs: Sequence[Sequence[Mapping[str, float]]], key: str) -> Curve:
    """(step, mean over the runs that logged it there)."""
    found: dict[float, list[float]] = {}
    for rows in runs:
        for row in rows:
            if key in row:
                found.setdefault(row["step"], []).append(row[key])
    return [(step, sum(values) / len(values)) for step, values in sorted(found.items())]
