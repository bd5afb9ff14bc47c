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
}
# Scores of evaluations during a run: drawn over each of AXES that the rows have.
SCORES = {
    "evaluate/retrieval/mean_recall": "Retrieval, mean recall",
    "evaluate/classification/acc1": "Zero-shot classification, top 1",
    "evaluate/composition/acc": "Composition",
    "evaluate/scenes/retrieval/mean_recall": "Scenes: retrieval",
    "evaluate/scenes/zero_shot/acc1": "Scenes: zero-shot",
    "evaluate/scenes/composition/mean_kind_acc": "Scenes: composition",
    "evaluate/scenes/pointing/pointing_words": "Scenes: pointing",
}
AXES = {"step": "step", "samples": "thousand samples", "seconds": "seconds", "flops": "PFLOPs, estimated"}
SCALES = {"samples": 1e-3, "flops": 1e-15}
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
    scores = []
    for key, title in SCORES.items():
        for axis, horizontal in AXES.items():
            series = {
                name: line
                for name, runs in logs.items()
                if (line := _mean_curve(runs, key, axis, SCALES.get(axis, 1.0), 100.0))
            }
            if any(len(line) > 1 for line in series.values()):
                scores.append(line_chart(f"{title}, %", series, colours, horizontal=horizontal, legend=False))
    names = " ".join(
        f'<span class="whole" style="color:{colour}">■ {escape(name)}</span>' for name, colour in colours.items()
    )
    sections = [f"<h1>Training curves</h1>\n<p>{names}</p>\n{_drawn(charts)}"]
    if scores:
        sections.append(
            "<h1>Scores during the runs</h1>\n<p>Over steps, samples, seconds of training without evaluations, and "
            f"operations of the towers, forward and backward.</p>\n{_drawn(scores)}"
        )
    return html_page("Training curves", "\n".join(sections))


def _drawn(charts: Sequence[str]) -> str:
    return '<div class="charts">' + "".join(f"<div>{chart}</div>" for chart in charts) + "</div>"


def _mean_curve(runs: Sequence[Log], key: str, axis: str = "step", across: float = 1.0, up: float = 1.0) -> Curve:
    """What each step has on the axis and of the key, means over the runs that logged both there, in other units."""
    logged: dict[float, list[tuple[float, float]]] = {}
    for rows in runs:
        for row in rows:
            if key in row and axis in row:
                logged.setdefault(row["step"], []).append((across * row[axis], up * row[key]))
    points = [zip(*values, strict=True) for _, values in sorted(logged.items())]
    return [(sum(x) / len(x), sum(y) / len(y)) for x, y in points]
