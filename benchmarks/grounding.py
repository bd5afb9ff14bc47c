"""The five grounding metrics of all methods in one table: trains a study, and measures its models on Flickr8k val.

    python benchmarks/grounding.py studies/grounding.yaml --seeds 3 --processes 3 -o runs/grounding
    python benchmarks/grounding.py runs/pretrained/both -o runs/pretrained/grounding     # models: METHOD/seed-N/model

Each run is measured by the process that trained it, and the table is brought up to date, so a table of what is done is
there at any time. What is trained or measured already is not done again: the command goes on where it stopped.
`$POWERCLIP_DATA` holds `captions10k/` and `grounding/`. Beside the methods stand the same towers before their first
step (`untrained`). The hard negatives are made first, from the validation captions, with the training captions as
evidence of what can be said; `--negatives` takes those that `powerclip negatives` has made.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean, stdev

import torch
from measure import run as run_script
from rich.console import Console

from powerclip.compare.pool import train_run
from powerclip.compare.run import RunOptions, compare_study, finished
from powerclip.compare.study import Run, RunFailure, Study, read_study
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import load, save, tokenizer_for
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedder, PixelStore
from powerclip.evaluate.hard_negatives.command import write_negatives
from powerclip.evaluate.hard_negatives.make import MOST
from powerclip.evaluate.runner import Job, evaluate, jobs_for_paths, read_records
from powerclip.report.table import Table
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic
from powerclip.runtime.processes import ProcessPool, Report, WorkerFunction
from powerclip.train.data import note_squashing
from powerclip.train.data_cache import DataCache
from powerclip.train.run_folder import RunFolder
from powerclip.train.state import start

PHRASES, MOSAICS, NEGATIVES = "flickr8k-val", "val-000", "flickr8k-val-negatives"  # files of results
UNTRAINED = "untrained"

# Column → file of results and metric.
COLUMNS = {
    "pointing": (PHRASES, "pointing_words"),
    "another's phrase": (PHRASES, "pointing_words_other"),
    "swap": (PHRASES, "swap_words"),
    "balanced": (PHRASES, "swap_words_balanced"),
    "alone, balanced": (PHRASES, "swap_text_balanced"),
    "set F1, one": (PHRASES, "set_f1_words_single"),
    "several": (PHRASES, "set_f1_words_several"),
    "grid": (MOSAICS, "grid_words"),
    "grid, highest": (MOSAICS, "grid_words_hit"),
    "composition": (NEGATIVES, "acc"),
    "mean image": (NEGATIVES, "mean_image_acc"),
}
# What needs no model: row → column → metric of the phrases, or a share.
BASELINES: dict[str, dict[str, str | float]] = {
    "chance": {"pointing": "pointing_chance", "grid": 0.25, "grid, highest": 0.25}
    | dict.fromkeys(("swap", "balanced", "alone, balanced", "composition", "mean image"), 0.5),
    "fixed patch": {"pointing": "pointing_fixed_patch"},
    "order alone": {"swap": "swap_by_order", "balanced": "swap_by_order_balanced"},
    "all boxes": {"set F1, one": "set_f1_all_boxes_single", "several": "set_f1_all_boxes_several"},
}

Measured = dict[str, dict[int, dict[str, Mapping[str, float]]]]  # method → seed → file of results → metrics


@dataclass(frozen=True)
class Data:
    """What models are measured on."""

    images: Path
    phrases: Path
    negatives: Path

    def jobs(self) -> list[Job]:
        """The evaluations, whose data are read once in a process."""
        jobs = jobs_for_paths([self.negatives], grounding=[self.phrases], images=[self.images], grid=[self.images])
        names = {self.negatives: NEGATIVES, self.phrases: PHRASES, self.images: MOSAICS}
        return [replace(job, file=names[Path(job.where)], find=cache(job.find)) for job in jobs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", help="a study's file, or a folder of models")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--only", action="append", default=[], help="this setting, and the baseline")
    parser.add_argument("--negatives", type=Path, help="hard negatives of the validation images, made before")
    parser.add_argument("--output", "-o", type=Path, required=True)
    given = parser.parse_args()
    root = Path(os.environ["POWERCLIP_DATA"])
    val = root / "captions10k" / "val-000.tar"
    negatives = given.negatives or given.output / f"{NEGATIVES}.json"
    if not negatives.exists():
        write_negatives(val, negatives, sorted((root / "captions10k").glob("train-*.tar")), most=MOST)
    data = Data(val, root / "grounding" / "flickr8k-val.jsonl.gz", negatives)
    if Path(given.study).is_dir():
        measure_models(Path(given.study), data, given.output, given.only)
        return
    study = read_study([given.study], [*given.overrides, "train.checkpoint_every=0"])
    study = study.only(given.only) if given.only else study
    seeds = list(range(given.seeds))
    failures = measure_study(study, data, given.output, seeds, given.processes)
    compare_study(study, given.output, seeds, RunOptions(keep_models=True), ())  # tries again what has failed
    if failures:
        measure_study(study, data, given.output, seeds, given.processes)


def measure_models(models: Path, data: Data, output: Path, only: list[str]) -> None:
    """Measure models that were trained elsewhere, one at a time."""
    folders = sorted(folder.parent for folder in models.glob("*/seed-*/model"))
    folders = [folder for folder in folders if not only or folder.parent.name in only]
    if not folders:
        raise UserError(f"{models} has no METHOD/seed-N/model" + f" of {', '.join(only)}" * bool(only))
    measured: Measured = {folder.parent.name: {} for folder in folders}
    seeds, pixels, jobs = sorted({_seed(folder) for folder in folders}), DataCache().pixels, data.jobs()
    for folder in folders:
        results = output / folder.parent.name / folder.name
        if not _is_measured(folder / "model", results):
            failure = measure_model(folder / "model", results, jobs, pixels)
            if failure:
                raise UserError(f"{folder}: {failure}")
        measured[folder.parent.name][_seed(folder)] = read_measured(results)
        write_table(measured, output, seeds)


def _seed(folder: Path) -> int:
    return int(folder.name.removeprefix("seed-"))


def measure_model(model: Path, results: Path, jobs: list[Job], pixels: PixelStore) -> str:
    """Measure one model; what failed or was missing, or nothing."""
    encoder, _, tokenizer = load(model, device="cuda" if torch.cuda.is_available() else "cpu")
    embedder = Embedder(encoder, CaptionTokenizer(tokenizer), pixels=pixels)
    done = evaluate(embedder, jobs, results, model=str(model), quiet=True)
    return "; ".join([*done.failed.values(), *done.missing.values()])


def read_measured(results: Path) -> dict[str, Mapping[str, float]]:
    """The metrics of each file of results."""
    return {file: read_records(results / f"{file}.json")[0]["metrics"] for file in (PHRASES, MOSAICS, NEGATIVES)}


def measure_study(study: Study, data: Data, output: Path, seeds: list[int], processes: int) -> int:
    """Train and measure the runs of a study, `processes` at a time; print and write the table as they end.

    Gives the number of those that failed.
    """
    runs = [run for seed in seeds for run in [_untrained(study, output, seed), *study.runs(output, [seed])]]
    order = [UNTRAINED, *(setting.name for setting in study.settings)]
    measured: Measured = {name: {} for name in order}
    failures, began = 0, time.monotonic()
    pool: ProcessPool[Run, str] = ProcessPool(partial(_load, data), processes, daemon=False)
    try:
        for run, failure in pool.run(runs, lambda: False, lambda run, message: None):
            head = f"[{time.monotonic() - began:.0f} s] {run.setting}, seed {run.seed}"
            if failure is None or failure:
                failures += 1
                print(f"{head}: failed: {failure or 'every process that tried it died'}", flush=True)
                continue
            measured[run.setting][run.seed] = read_measured(_results(run.folder))
            print(f"{head}: measured", flush=True)
            write_table(measured, output, seeds)
    finally:
        pool.close()
    return failures


def _untrained(study: Study, output: Path, seed: int) -> Run:
    """The towers of the baseline before their first step."""
    recipe = next(setting for setting in study.settings if setting.name == study.baseline).at(seed)
    return Run(UNTRAINED, seed, recipe, RunFolder(output / UNTRAINED / f"seed-{seed}"))


def _load(data: Data, number: int, count: int) -> WorkerFunction[Run, str]:
    """The worker of a process: it keeps the data of training and of evaluation."""
    if "OMP_NUM_THREADS" not in os.environ:  # a user's own number stays
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    corpora, jobs, silent = DataCache(), data.jobs(), Console(quiet=True)

    def work(run: Run, report: Report) -> str:
        """Train and measure one run; why it failed, or nothing."""
        try:
            if run.setting == UNTRAINED:
                _save_untrained(run)
            elif not (finished(run.folder, run.recipe) and run.folder.model.is_dir()):
                trained = train_run(run, corpora, silent, quiet=True)
                if isinstance(trained, RunFailure):
                    return trained.reason
            if not _is_measured(run.folder.model, _results(run.folder)):
                return measure_model(run.folder.model, _results(run.folder), jobs, corpora.pixels)
        except (UserError, torch.OutOfMemoryError) as error:
            return str(error)
        return ""

    return work


def _save_untrained(run: Run) -> None:
    if not run.folder.model.is_dir():
        encoder = start(run.recipe).encoder
        note_squashing(run.recipe, encoder)
        save(encoder, run.folder.model, tokenizer_for(encoder))


def _results(folder: RunFolder) -> Path:
    return folder.root / "grounding"


def _is_measured(model: Path, results: Path) -> bool:
    """Whether all results are newer than the model."""
    files = [results / f"{file}.json" for file in (PHRASES, MOSAICS, NEGATIVES)]
    trained = max(path.stat().st_mtime for path in model.iterdir())
    return all(path.exists() and path.stat().st_mtime >= trained for path in files)


def write_table(measured: Measured, output: Path, seeds: list[int]) -> None:
    """Print the table of what is measured so far, and write `grounding.md` and `grounding.json`."""
    runs = [run for of_method in measured.values() for run in of_method.values()]
    phrases = runs[0][PHRASES]
    rows = []
    for name, columns in BASELINES.items():
        values = {column: phrases[of] if isinstance(of, str) else of for column, of in columns.items()}
        rows.append([name, *(f"{100 * values[column]:.1f}" if column in values else "" for column in COLUMNS)])
    for method, of_seeds in measured.items():
        if of_seeds:
            cells = [[100 * run[file][metric] for run in of_seeds.values()] for file, metric in COLUMNS.values()]
            name = method if len(of_seeds) == len(seeds) else f"{method} ({len(of_seeds)} of {len(seeds)} seeds)"
            rows.append([name, *(_shown(values) for values in cells)])
    table = Table.plain(["%", *COLUMNS], rows)
    page = f"{table.markdown()}\n\nSeeds {seeds}; {machine()}.\n"
    print(page, flush=True)
    write_atomic(output / "grounding.md", page.encode())
    content = {"machine": machine(), "seeds": seeds, "runs": measured}
    write_atomic(output / "grounding.json", (json.dumps(content, indent=1) + "\n").encode())


def _shown(values: list[float]) -> str:
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


if __name__ == "__main__":
    run_script(main)
