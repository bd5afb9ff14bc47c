"""Draw studies on captions10k: python benchmarks/studies_plot.py benchmarks/results docs/images/captions10k-studies.png

One panel for each study, one row for each setting: mean recall of every seed, and their mean. The band is the
baseline's mean ± standard deviation. A setting that an earlier panel shows is not shown again.
"""

import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

PANELS = {
    "Negatives": "2026-11-16-h200-captions10k-negatives.json",
    "Learning rate": "2026-11-16-h200-captions10k-rate.json",
    "Scores of sets": "2026-11-16-h200-captions10k-aggregation.json",
    "Activations, α, λ": "2026-11-16-h200-captions10k-table8.json",
    "Regions": "2026-11-16-h200-captions10k-table7.json",
    "Components": "2026-11-15-h200-captions10k-table6.json",
}
SCORE = "retrieval/mean_recall"
OLD_NAMES = {"retrieval/mean_recall": "retrieval/mean"}  # in results that do not say `"format": 2`
BASELINE, OURS = "#7f8c8d", "#1f6fb2"


def main(results: Path, image: Path) -> None:
    studies = {title: json.loads((results / name).read_text()) for title, name in PANELS.items()}
    plt.rcParams.update(
        {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False}
    )
    panels, shown = {}, set[tuple[float, ...]]()
    for title, study in studies.items():
        rows = {name: scores(setting) for name, setting in study["settings"].items()}
        panels[title] = {name: values for name, values in rows.items() if values not in shown}
        shown.update(panels[title].values())
    row_count = max(map(len, panels.values()))
    figure, axes = plt.subplots(2, 3, figsize=(9, 0.38 * row_count + 1.4), sharex=True, layout="constrained")
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=True):
        study = studies[title]
        draw(axis, rows, scores(study["settings"][study["baseline"]]), study["baseline"])
        axis.set_title(title, loc="left", fontweight="bold")
        axis.set_xlabel("mean recall, %")
        axis.xaxis.set_tick_params(labelbottom=True)
        axis.set_ylim(row_count - 0.4, -0.6)
    figure.savefig(image, dpi=150)


def scores(setting: dict[str, Any]) -> tuple[float, ...]:
    """In percent, seed by seed."""
    finished = [run for run in setting["runs"].values() if "scores" in run]
    return tuple(100 * run["scores"][SCORE if "format" in run else OLD_NAMES[SCORE]] for run in finished)


def draw(axis: Axes, rows: dict[str, tuple[float, ...]], baseline: tuple[float, ...], name: str) -> None:
    center, std = mean(baseline), stdev(baseline)
    axis.axvspan(center - std, center + std, color=BASELINE, alpha=0.25, lw=0)
    for row, (setting, values) in enumerate(rows.items()):
        colour = BASELINE if setting == name or setting.startswith(f"{name},") else OURS
        axis.plot(values, [row] * len(values), "o", color=colour, ms=3, alpha=0.5, mew=0)
        axis.plot([mean(values)], [row], "|", color=colour, ms=9, mew=2)
    axis.set_yticks(range(len(rows)), rows)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", lw=0.3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
