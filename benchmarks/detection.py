"""Detectors on several models' towers, equal budget: how each names gold boxes, and AP50 of base and of novel classes.

    python benchmarks/detection.py runs/grounding --methods clip,powerclip_one --data $POWERCLIP_DATA/ovcoco-mini \
        --size 240 --steps 600 --width 128 --hidden 512 --processes 6 -o runs/detection

The folder of models is that of a study: METHOD/seed-N/model. The data are a folder with `train.json.gz` and
`val.json.gz`, or `scenes`. Several models are done at a time, and what is finished is not done again. The table is
written anew after each: `detection.md`, `detection.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from measure import run

from powerclip.compare.significance import paired_p
from powerclip.detect.evaluate import evaluate_detection
from powerclip.detect.naming import name_by_detector
from powerclip.detect.recipe import SCENES, DetectFolder, DetectRecipe
from powerclip.detect.saved import is_detector, load_detector
from powerclip.detect.train import read_boxes, train_detector
from powerclip.errors import UserError
from powerclip.report.table import Table
from powerclip.runtime.distributed import choose_device
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic
from powerclip.runtime.processes import ProcessPool

VIEWS = ("region", "crop", "image", "learned", "both")
NAMING = [f"{view}_{part}" for view in VIEWS for part in ("base", "novel", "base_mean", "novel_mean")]
SETTINGS = ("size", "steps", "calibration_steps", "batch_size", "width", "hidden", "lr", "tune")
FOUND = ["ap50_base", "ap50_novel", "ap50"]


@dataclass(frozen=True, eq=False)  # a recipe has no hash: a task is itself
class Task:
    """One model of one seed."""

    method: str
    seed: int
    model: Path
    output: Path
    recipe: DetectRecipe
    val: str
    val_images: tuple[str, ...]
    only_names: bool

    @property
    def key(self) -> tuple[str, int]:
        """Its method and seed."""
        return self.method, self.seed

    @property
    def measured(self) -> Path:
        """What was measured of it."""
        return self.output / f"{self.method}-{self.seed}.json"


def measure_task(task: Task, say: Callable[[str], None]) -> dict[str, Any]:
    """Name gold boxes, train, find boxes, name gold boxes again; parts that were done before are read."""
    began = time.perf_counter()
    found: dict[str, Any] = json.loads(task.measured.read_text()) if task.measured.is_file() else {}
    data = {"scenes": task.recipe.scenes, "images": task.val_images, "quiet": True}

    def keep(values: dict[str, Any]) -> None:
        found.update(values)
        write_atomic(task.measured, (json.dumps(found, indent=1) + "\n").encode())

    if "region_base" not in found:
        folder = task.output / "naming" / f"{task.method}-{task.seed}"
        record = evaluate_detection(
            str(task.model), task.val, gold_boxes=True, size=task.recipe.size, output=folder, **data
        )
        keep({**record["metrics"], "baselines": record["powerclip"]["baselines"]})
        say(f"named gold boxes, {time.perf_counter() - began:.0f} s")
    if task.only_names:
        return found
    if "ap50" not in found:
        detector = DetectFolder(task.output / task.method / f"seed-{task.seed}")
        if not is_detector(detector.root):
            train_detector(task.recipe, detector.root, resume=detector.holds_run(), quiet=True)
            say(f"trained, {time.perf_counter() - began:.0f} s")
        boxes = evaluate_detection(str(detector.root), task.val, **data)
        own = name_as_detector(detector, task)
        about = boxes["powerclip"]
        keep({**boxes["metrics"], **own, "exponents": about["exponents"], "of_class": about["of_class"]})
        say(f"measured, {time.perf_counter() - began:.0f} s")
    return found


def name_as_detector(folder: DetectFolder, task: Task) -> dict[str, float]:
    """How the detector's own opinions name gold boxes."""
    trained = load_detector(folder.root, choose_device("auto"))
    boxes = read_boxes(task.val, list(task.val_images), task.recipe.scenes, "val")
    classes = trained.classes(boxes.classes.names)
    texts = trained.embed(classes)
    named = name_by_detector(
        trained.detector, boxes, texts, trained.exponents.of(classes).to(texts.device)
    ).accuracies()
    return {f"{view}_{part}": value for view in ("learned", "both") for part, value in named[view].items()}


def load_worker(number: int, count: int) -> Callable[[Task, Callable[[Any], None]], dict[str, Any]]:
    """What a process of the pool does."""
    return measure_task


def find_models(folder: Path, methods: Sequence[str]) -> list[tuple[str, int, Path]]:
    """Method, seed and folder of each model."""
    names = methods or sorted(path.name for path in folder.iterdir() if list(path.glob("seed-*/model")))
    models = [
        (name, int(path.parent.name.removeprefix("seed-")), path)
        for name in names
        for path in sorted((folder / name).glob("seed-*/model"))
    ]
    if not models:
        raise UserError(f"{folder}: no METHOD/seed-N/model")
    return models


def summarise(measured: dict[tuple[str, int], dict[str, Any]], output: Path, about: dict[str, Any]) -> str:
    """Write the table of what is there so far, means over seeds; gives it."""
    methods = list(dict.fromkeys(method for method, _ in measured))
    heads = ["%", *methods]
    pair = methods[:2] if len(methods) > 1 else []
    rows = []
    for key in [*FOUND, *NAMING]:
        cells = [
            [100 * one[key] for (m, _), one in measured.items() if m == method and key in one] for method in methods
        ]
        if not any(cells):
            continue
        seeds = [{seed for (m, seed), one in measured.items() if m == method and key in one} for method in pair]
        both = sorted(set.intersection(*seeds)) if seeds else []
        p = paired_p(*([measured[m, seed][key] for seed in both] for m in reversed(pair))) if len(both) > 1 else None
        rows.append([key, *map(_shown, cells), *([f"{p:.3f}" if p is not None else ""] if pair else [])])
    heads += [f"p, {pair[1]} and {pair[0]}"] if pair else []
    first = next(iter(measured.values()), {})
    for view, values in first.get("baselines", {}).items():
        shown = ", ".join(f"{part} {100 * value:.1f}" for part, value in values.items())
        rows.append([view, shown, *([""] * (len(heads) - 2))])
    page = f"{Table.plain(heads, rows).markdown()}\n\n{machine()}; {json.dumps(about)}\n"
    write_atomic(output / "detection.md", page.encode())
    content = {
        "machine": machine(),
        **about,
        "runs": [{"method": m, "seed": s, **one} for (m, s), one in measured.items()],
    }
    write_atomic(output / "detection.json", (json.dumps(content, indent=1) + "\n").encode())
    return page


def _shown(values: list[float]) -> str:
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "") if values else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path)
    parser.add_argument("--methods", default="", help="which of them, the baseline first: a,b")
    parser.add_argument("--data", required=True, help="a folder with train.json.gz and val.json.gz, or scenes")
    parser.add_argument("--output", "-o", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only-names", action="store_true", help="gold boxes, no training")
    for name, kind, default in (("size", int, 240), ("steps", int, 600), ("batch-size", int, 16), ("width", int, 128)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--calibration-steps", type=int, default=0)
    for name, kind, default in (("hidden", int, 512), ("lr", float, 5e-4), ("scenes", int, 500), ("tune", float, 0.0)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    given = parser.parse_args()
    tasks = []
    for method, seed, model in find_models(given.models, [name for name in given.methods.split(",") if name]):
        recipe = DetectRecipe(
            model=str(model),
            data=SCENES if given.data == SCENES else f"{given.data}/train.json.gz",
            scenes=given.scenes,
            seed=seed,
            warmup=given.steps // 10,
            **{key: getattr(given, key) for key in SETTINGS},
        )
        val = SCENES if given.data == SCENES else f"{given.data}/val.json.gz"
        tasks.append(Task(method, seed, model, given.output, recipe, val, (), given.only_names))
    # Seed by seed, so that what is there after a while compares all methods.
    tasks.sort(key=lambda task: task.seed)
    about = {"data": Path(given.data).name, **{key: getattr(given, key) for key in SETTINGS}}
    measured: dict[tuple[str, int], dict[str, Any]] = {}
    order = list(dict.fromkeys(task.method for task in tasks))
    torch.set_num_threads(1)
    pool: ProcessPool[Any, dict[str, Any]] = ProcessPool(load_worker, given.processes)
    by_key = {task.key: task for task in tasks}

    def show(key: tuple[str, int], text: str) -> None:
        print(f"{key[0]} seed {key[1]}: {text}", flush=True)
        path = by_key[key].measured
        if path.is_file():
            measured[key] = json.loads(path.read_text())
            ordered = dict(sorted(measured.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))
            summarise(ordered, given.output, about)

    try:
        for task, result in pool.run(tasks, lambda: False, lambda task, text: show(task.key, text)):
            show(task.key, "done" if result is not None else "failed")
    finally:
        pool.close()
    print((given.output / "detection.md").read_text())


if __name__ == "__main__":
    run(main)
