"""How abilities grow with the number of pictures: the table and the figure of `studies/growth-scenes.yaml`.

    powerclip compare studies/growth-scenes.yaml data.cache=runs/drawn --seeds 1 --processes 4
    python benchmarks/growth.py runs/growth-scenes/results.json -o growth

All runs see the same scenes: with `data.cache` they are drawn once, a kilobyte each. Several results are joined. A
setting is called by its method and its count ("clip 300k"). What is finished is shown, in `growth.md` and `growth.png`
in the folder of `-o`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from powerclip.evaluate.metrics import KINDS
from powerclip.report.table import Table
from powerclip.runtime.files import write_atomic

# Ability → score, and what needs no model: a score, or a share.
ABILITIES: dict[str, tuple[str, str | float | None]] = {
    "retrieval": ("retrieval/mean_recall", None),
    "zero-shot": ("zero_shot/acc1", 1 / 12),
    **{kind: (f"composition/{kind}/acc", 0.5) for kind in KINDS},
    "pointing": ("pointing/pointing_words", "pointing/pointing_chance"),
    "swap": ("grounding/swap_words_balanced", 0.5),
    "swap, alone": ("grounding/swap_text_balanced", 0.5),
    "set F1, one": ("grounding/set_f1_words_single", "grounding/set_f1_all_boxes_single"),
    "alone": ("grounding/set_f1_text_single", "grounding/set_f1_all_boxes_single"),
    "set F1, several": ("grounding/set_f1_words_several", "grounding/set_f1_all_boxes_several"),
    "several, alone": ("grounding/set_f1_text_several", "grounding/set_f1_all_boxes_several"),
    "exact, several": ("grounding/set_exact_words_several", "grounding/set_exact_all_boxes_several"),
}
NAMES = {
    "clip": "CLIP",
    "filip": "FILIP",
    "one": "one region",
    "any": "any set",
    "cosine": "cosine sets",
    "patches": "patches",
}
COLOURS = {
    "clip": "#7f8c8d",
    "filip": "#e08e0b",
    "one": "#1f6fb2",
    "any": "#2e8b57",
    "cosine": "#c0392b",
    "patches": "#7d3c98",
}
_SETTING = re.compile(r"(\w+) (\d+)([kM])")

Curves = dict[str, dict[int, list[dict[str, float]]]]  # method → number of pictures → scores of each seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="results.json of the study, or of parts of it")
    parser.add_argument("--output", "-o", type=Path, default=Path())
    given = parser.parse_args()
    studies = [json.loads(path.read_text(encoding="utf-8")) for path in given.results]
    study = studies[0]
    curves = read_curves({name: setting for one in studies for name, setting in one["settings"].items()})
    page = f"{growth_table(curves).markdown()}\n\nPercent; seeds {study['seeds']}; {study['machine']}.\n"
    print(page)
    given.output.mkdir(parents=True, exist_ok=True)
    write_atomic(given.output / "growth.md", page.encode())
    draw(curves, given.output / "growth.png")


def read_curves(settings: Mapping[str, Any]) -> Curves:
    """The scores of finished runs, by method and number of pictures."""
    curves: Curves = {}
    for name, setting in settings.items():
        method, count, unit = _SETTING.fullmatch(name).groups()  # type: ignore[union-attr]
        runs = [run["scores"] for run in setting["runs"].values() if "scores" in run]
        if runs:
            curves.setdefault(method, {})[int(count) * {"k": 1_000, "M": 1_000_000}[unit]] = [
                {score.removeprefix("scenes/"): value for score, value in run.items()} for run in runs
            ]
    return {method: dict(sorted(curves[method].items())) for method in NAMES if method in curves}


def growth_table(curves: Curves) -> Table:
    """A row for each method and count, and one for what needs no model."""
    any_run = next(iter(next(iter(curves.values())).values()))[0]
    without = [of if not isinstance(of, str) else any_run.get(of) for _, of in ABILITIES.values()]
    rows = [["no model", "", *("" if value is None else f"{100 * value:.1f}" for value in without)]]
    for method, by_count in curves.items():
        for count, runs in by_count.items():
            cells = [_shown([100 * run[score] for run in runs if score in run]) for score, _ in ABILITIES.values()]
            rows.append([NAMES[method], f"{count:,}", *cells])
    return Table.plain(["", "pictures", *ABILITIES], rows)


def _shown(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "") if values else ""


def draw(curves: Curves, image: Path) -> None:
    """A panel for each ability, a line for each method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    any_run = next(iter(next(iter(curves.values())).values()))[0]
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(3, 6, figsize=(13, 6.4), sharex=True, layout="constrained")
    *panels, legend = axes.flat
    for axis, (ability, (score, without)) in zip(panels, ABILITIES.items(), strict=True):
        for method, by_count in curves.items():
            points = {
                count: [100 * run[score] for run in runs if score in run]
                for count, runs in by_count.items()
                if any(score in run for run in runs)
            }
            heights = [mean(values) for values in points.values()]
            axis.plot([*points], heights, "o-", color=COLOURS[method], ms=3, label=NAMES[method])
        level = any_run.get(without) if isinstance(without, str) else without
        if level is not None:
            axis.axhline(100 * level, color="black", lw=0.6, ls=":")
        axis.set(title=ability, xscale="log")
    legend.axis("off")
    legend.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="center")
    figure.supxlabel("pictures (dotted: without a model; for sets, all boxes)")
    figure.supylabel("%")
    figure.savefig(image, dpi=130)


if __name__ == "__main__":
    main()
