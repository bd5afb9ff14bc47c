"""The five grounding metrics of all methods in one table: trains a study, then measures its models on Flickr8k val.

    python benchmarks/grounding.py studies/grounding.yaml --seeds 3 -o runs/grounding

What is trained or measured already is not done again, so the command goes on where it stopped. `$POWERCLIP_DATA` holds
`captions10k/` and `grounding/`. Beside the methods stand towers with random weights (`untrained`). The hard negatives
are made first, from the validation captions, with the training captions as evidence of what can be said.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

import torch

from powerclip.compare.run import RunOptions, compare_study
from powerclip.compare.study import read_study
from powerclip.encoders import build, save
from powerclip.evaluate.hard_negatives.command import write_negatives
from powerclip.evaluate.hard_negatives.make import MOST
from powerclip.evaluate.runner import evaluate_model, read_records
from powerclip.report.table import Table
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic

# Column → file of results and metric; None: the baseline, which has no models of its own.
COLUMNS = {
    "pointing": ("flickr8k-val", "pointing_words"),
    "alone": ("flickr8k-val", "pointing_text"),
    "swap": ("flickr8k-val", "swap_words"),
    "balanced": ("flickr8k-val", "swap_words_balanced"),
    "alone, balanced": ("flickr8k-val", "swap_text_balanced"),
    "set F1, one": ("flickr8k-val", "set_f1_words_single"),
    "several": ("flickr8k-val", "set_f1_words_several"),
    "grid": ("val-000", "grid_words"),
    "grid, highest": ("val-000", "grid_words_hit"),
    "composition": ("flickr8k-val-negatives", "acc"),
    "without images": ("flickr8k-val-negatives", "mean_image_acc"),
}
# What needs no model: row → column → metric of `flickr8k-val`, or a share.
BASELINES: dict[str, dict[str, str | float]] = {
    "chance": {"pointing": "pointing_chance", "alone": "pointing_chance", "grid": 0.25, "grid, highest": 0.25}
    | dict.fromkeys(("swap", "balanced", "alone, balanced", "composition", "without images"), 0.5),
    "fixed patch": {"pointing": "pointing_fixed_patch", "alone": "pointing_fixed_patch"},
    "order alone": {"swap": "swap_by_order", "balanced": "swap_by_order_balanced"},
    "all boxes": {"set F1, one": "set_f1_all_boxes_single", "several": "set_f1_all_boxes_several"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", "-o", type=Path, required=True)
    given = parser.parse_args()
    data = Path(os.environ["POWERCLIP_DATA"])
    val = data / "captions10k" / "val-000.tar"
    negatives = given.output / "flickr8k-val-negatives.json"
    if not negatives.exists():
        write_negatives(val, negatives, sorted((data / "captions10k").glob("train-*.tar")), most=MOST)
    study = read_study([given.study], given.overrides)
    seeds = list(range(given.seeds))
    compare_study(study, given.output, seeds, RunOptions(keep_models=True), ())
    for seed in seeds:
        untrained = given.output / "untrained" / f"seed-{seed}" / "model"
        if not untrained.exists():
            trained = given.output / study.baseline / f"seed-{seed}" / "model"
            torch.manual_seed(seed)
            save(build(config=json.loads((trained / "open_clip_config.json").read_text())["model_cfg"]), untrained)
    methods = ["untrained", *(setting.name for setting in study.settings)]
    measured: dict[str, list[dict[str, Mapping[str, float]]]] = {method: [] for method in methods}
    for method in methods:
        for seed in seeds:
            results = given.output / method / f"seed-{seed}" / "grounding"
            if not (results / "val-000.json").exists():  # the last of the three
                evaluate_model(
                    str(given.output / method / f"seed-{seed}" / "model"),
                    [negatives],
                    grounding=[data / "grounding" / "flickr8k-val.jsonl.gz"],
                    images=[val],
                    grid=[val],
                    output=results,
                    cache=False,
                )
            files = {file for file, _ in COLUMNS.values()}
            measured[method].append({file: read_records(results / f"{file}.json")[0]["metrics"] for file in files})
    write_table(measured, given.output, seeds)


def write_table(measured: dict[str, list[dict[str, Mapping[str, float]]]], output: Path, seeds: list[int]) -> None:
    """Print the table, and write `grounding.md` and `grounding.json`."""
    any_run = next(iter(measured.values()))[0]["flickr8k-val"]
    rows = []
    for name, columns in BASELINES.items():
        values = {column: any_run[of] if isinstance(of, str) else of for column, of in columns.items()}
        rows.append([name, *(f"{100 * values[column]:.1f}" if column in values else "" for column in COLUMNS)])
    for method, runs in measured.items():
        cells = [[100 * run[file][metric] for run in runs] for file, metric in COLUMNS.values()]
        rows.append([method, *(_shown(values) for values in cells)])
    table = Table.plain(["%", *COLUMNS], rows)
    page = f"{table.markdown()}\n\nSeeds {seeds}; {machine()}.\n"
    print(page)
    write_atomic(output / "grounding.md", page.encode())
    content = {"machine": machine(), "seeds": seeds, "runs": measured}
    write_atomic(output / "grounding.json", (json.dumps(content, indent=1) + "\n").encode())


def _shown(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
