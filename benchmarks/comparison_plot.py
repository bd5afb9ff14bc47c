"""Draw the runs of a comparison: python benchmarks/comparison_plot.py RESULTS.jsonl docs/images/captions10k-curves.png

Losses, violations and images/s over the steps, a thin line for each seed and a thick one for their mean.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

COLOURS = {"clip": ("CLIP", "#7f8c8d"), "powerclip": ("PowerCLIP-R", "#1f6fb2")}
PANELS = {
    "clip": ("CLIP's loss, of the batch", None),
    "alignment": ("alignment loss", None),
    "violation": ("violation rate: hardest\nnegative beats the positive", (-0.02, 1.02)),
    "samples_per_second": ("images/s, data pipeline included", (0, None)),
}


def main(results: Path, image: Path) -> None:
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    runs = [row for row in rows if "trace" in row]
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3), layout="constrained")
    for axis, (key, (title, limits)) in zip(axes, PANELS.items(), strict=True):
        for setting, (label, colour) in COLOURS.items():
            lines = [curve(run["trace"], key) for run in runs if run["setting"] == setting]
            lines = [line for line in lines if len(line[0])]
            if not lines:
                continue
            for steps, values in lines:
                axis.plot(steps, values, color=colour, lw=0.5, alpha=0.4)
            axis.plot(lines[0][0], np.mean([values for _, values in lines], axis=0), color=colour, label=label)
        axis.set(title=title, xlabel="step", ylim=limits)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(image, dpi=150)


def curve(trace: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    # The first steps compile and record.
    points = [point for point in trace if key in point and point["step"] > (20 if key == "samples_per_second" else 0)]
    return [point["step"] for point in points], [point[key] for point in points]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
