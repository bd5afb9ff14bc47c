"""Draw why the printed loss dies: python benchmarks/learning_plot.py RESULTS.jsonl docs/images/learning.png"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SETTINGS = {
    "paper": ("as printed: triplet, sums", "#c0392b"),
    "sum": ("softmax over sums, centred", "#e08e0b"),
    "centre none": ("softmax over means", "#7f8c8d"),
    "default": ("softmax over means, centred (default)", "#1f6fb2"),
}
PANELS = {
    "violation": "violation rate:\nhardest negative beats the positive",
    "empty": "share of phrases whose\nbest set is the empty one",
    "length_correlation": "correlation of a caption's mean score\nwith its number of leaves",
}


def main(results: Path, image: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    traces = {row["setting"]: row["trace"] for row in rows if "trace" in row and row["towers"] == "tiny"}
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 4, figsize=(12, 3), layout="constrained")
    for axis, (key, title) in zip(axes, PANELS.items(), strict=False):
        for name, (label, colour) in SETTINGS.items():
            axis.plot(*series(traces[name], key), color=colour, label=label)
        axis.set(title=title, xlabel="step", ylim=(-0.05, 1.05))
    for name in ("paper", "default"):
        steps, median = series(traces[name], "q50")
        colour = SETTINGS[name][1]
        axes[3].plot(steps, median, color=colour)
        axes[3].fill_between(
            steps, series(traces[name], "q05")[1], series(traces[name], "q95")[1], color=colour, alpha=0.2, lw=0
        )
    axes[3].axhline(0, color="black", lw=0.6)
    axes[3].set(title="similarity q of matched pairs:\nmedian, 5 % to 95 %", xlabel="step", ylim=(-1.6, 0.6))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(image, dpi=150)


def series(trace: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    return [point["step"] for point in trace], [point[key] for point in trace]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
