"""The quickstart: a study of CLIP and PowerCLIP on the embedded scenes, with a report for newcomers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from rich.console import Console

from powerclip.compare.run import RunOptions, run_study
from powerclip.compare.scene_heatmaps import scene_rows
from powerclip.compare.study import Run, RunFailure, StudyResults, read_study
from powerclip.compare.table import Measure, mean_std, values
from powerclip.encoders import load
from powerclip.errors import UserError
from powerclip.evaluate.metrics import CUTOFFS, KINDS
from powerclip.evaluate.scenes import scene_tasks
from powerclip.evaluate.tasks import Classification, HardNegatives, PointingGame
from powerclip.report.charts import Curve, smooth
from powerclip.report.heatmaps import heatmap_figure, png_bytes
from powerclip.report.quickstart_page import CLASSES, TITLE, Report, render
from powerclip.report.table import Cell, Column, Row, Table, fixed, rank, signed
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import print_line
from powerclip.train.metrics import read_metrics
from powerclip.train.run_folder import RunFolder

RECIPES = ("quickstart/clip", "quickstart/powerclip")  # the baseline first
LAYOUT = "seed-{seed}/{setting}"
MODELS = {"clip": "CLIP", "powerclip": "PowerCLIP"}  # setting → what tables call it
CURVES = {"clip": "CLIP loss", "alignment": "Alignment loss", "violation": "Violation rate"}
KIND_LABELS = {
    "replace_obj": "replace an object",
    "replace_att": "replace an attribute",
    "replace_rel": "replace a relation",
    "swap_obj": "swap two objects",
    "swap_att": "swap two attributes",
    "add_obj": "add an object",
    "add_att": "add an attribute",
}


@dataclass(frozen=True)
class Line:
    """A measure of the table: its section, its label, the key of its score, and the percentage of random answers."""

    section: str
    label: str
    key: str
    chance: float


def run_quickstart(
    output: Path = Path("runs/quickstart"),
    *,
    seed: int = 0,
    seeds: int = 1,
    steps: int | None = None,
    scenes: int | None = None,
    quiet: bool = False,
    console: Console | None = None,
) -> StudyResults:
    """Run the study, print the table, write `report.html` and `heatmaps.png` beside the study's own files.

    A run that is already finished is not trained again, an interrupted one continues; either is replaced when the
    recipe has changed since.

    Args:
        output: the folder for everything.
        seed: of the first pair of runs; the next ones count up from it.
        seeds: pairs of runs; with several, the table shows mean ± standard deviation.
        steps: training steps, instead of the recipes'.
        scenes: test scenes to evaluate on, instead of the recipes'.
        quiet: print only the table.
        console: where to print; standard output by default.

    Raises:
        UserError: a run failed, or an argument is out of its range.
    """
    for name, value, least in (("seeds", seeds, 1), ("steps", steps, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, not {value}")
    # The recipes warm up for a tenth of their steps.
    overrides = [f"train.steps={steps}", f"optim.warmup={steps // 10}"] if steps is not None else []
    overrides += [f"evaluation.scenes={scenes}"] if scenes is not None else []
    study = replace(read_study(RECIPES, overrides), about=f"{TITLE}.", layout=LAYOUT)
    numbers = range(seed, seed + seeds)
    console = console or Console()
    options = RunOptions(keep_models=True, resume=True, log_steps=True, quiet=quiet, console=console)
    results = run_study(study, output, numbers, options)
    runs = study.runs(output, numbers)
    for run in runs:
        result = results[run.setting][run.seed]
        if isinstance(result, RunFailure):
            raise UserError(f"{run.setting}, seed {run.seed}: {result.reason}")
    table = _write_report(output, runs, results, numbers, _command(numbers, steps))
    table.print(console, boxed=True)
    print_line(console, f"Report with curves and heatmaps: {output / 'report.html'}")
    return results


def lines(results: StudyResults, counts: Mapping[str, int]) -> list[Line]:
    """The measures of the table, with what random answers would give."""
    first = next(iter(next(iter(results.values())).values()))
    assert not isinstance(first, RunFailure)
    measures = []
    for side, label in (("text", "image → text"), ("image", "text → image")):
        for k in CUTOFFS:
            key = f"scenes/retrieval/{side}_retrieval_recall@{k}"
            measures.append(Line("Retrieval", f"{label}, R@{k}", key, 100 * k / counts["scenes"]))
    for k in (1, 5):
        chance = 100 * min(1.0, k / counts["classes"])
        measures.append(Line("Zero-shot", f"unseen pairs, top {k}", f"scenes/zero_shot/acc{k}", chance))
    for kind in KINDS:
        key = f"scenes/composition/{kind}/acc"
        if key in first.scores:  # a few scenes may have no negative of a kind
            measures.append(Line("Composition", KIND_LABELS[kind], key, 50.0))
    measures.append(Line("Composition", "mean", "scenes/composition/mean_kind_acc", 50.0))
    # Untrained towers already point at objects, which stand out: whether at the right one is what matters.
    for query, label in (("words", "in caption"), ("text", "alone")):
        for which, target in (("", "its own"), ("_any", "any")):
            chance = 100 * first.scores[f"scenes/pointing/pointing_chance{which}"]
            key = f"scenes/pointing/pointing_{query}{which}"
            measures.append(Line("Pointing game", f"{label}: {target}", key, chance))
    return measures


def quickstart_table(
    measures: Sequence[Line], results: StudyResults, seconds: Mapping[str, Sequence[float]], seeds: Sequence[int]
) -> Table:
    """Both models beside chance, a row for each measure, and the training times; the better model is marked."""
    rows = []
    for line in measures:
        scored = [list(values(results, name, Measure(line.key, line.label)).values()) for name in MODELS]
        baseline, ours = map(mean, scored)
        marks = rank([baseline, ours])
        ahead = [name for name, mark in zip(CLASSES.values(), marks, strict=True) if mark == "best"]
        cells = [
            Cell(fixed(line.chance)),
            *(Cell(mean_std(scores), mark) for scores, mark in zip(scored, marks, strict=True)),
            Cell(signed(ours - baseline), css=f"ahead-{ahead[0]}" if ahead else ""),
        ]
        rows.append(Row(line.label, cells, line.section, css="mean" if line.label == "mean" else ""))
    times = [list(seconds[name]) for name in MODELS]
    cells = [Cell(""), *(Cell(f"{mean_std(runs, 0)} s") for runs in times)]
    rows.append(Row("time", [*cells, Cell(f"{signed(mean(times[1]) - mean(times[0]), 0)} s")], "Training"))
    over = f"mean ± sd of {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    columns = [Column("chance", css="faint"), *(Column(model, css=CLASSES[model]) for model in MODELS.values())]
    return Table([*columns, Column("difference")], rows, title=f"{TITLE} (%, {over})")


def training_seconds(folder: RunFolder, batch_size: int) -> float:
    """How long the run took, over all its parts if it was interrupted: from the speeds that it logged."""
    seconds, before = 0.0, 0.0
    for row in read_metrics(folder.metrics):
        if "samples_per_second" in row:
            seconds += (row["step"] - before) * batch_size / row["samples_per_second"]
            before = row["step"]
    return seconds


def _write_report(
    output: Path, runs: Sequence[Run], results: StudyResults, seeds: Sequence[int], command: str
) -> Table:
    """Write `report.html` and `heatmaps.png`, of the first seed where only one can be shown; return the table."""
    first = {MODELS[run.setting]: run for run in runs if run.seed == seeds[0]}
    encoders = {model: load(run.folder.model)[0] for model, run in first.items()}
    heatmaps = png_bytes(heatmap_figure(scene_rows(encoders)))
    ours = first[MODELS["powerclip"]].recipe
    encoder = encoders[MODELS["powerclip"]]
    counts = _counts(ours.evaluation.scenes, encoder.image_size[0])
    seconds: dict[str, list[float]] = {name: [] for name in MODELS}
    for run in runs:
        seconds[run.setting].append(training_seconds(run.folder, run.recipe.train.batch_size))
    measures = lines(results, counts)
    table = quickstart_table(measures, results, seconds, seeds)
    contests = table.rows[: len(measures)]
    report = Report(
        table=replace(table, title=""),  # the page has its own
        measures=len(measures),
        ahead={
            model: sum(row.cells[column].mark == "best" for row in contests)
            for column, model in enumerate(MODELS.values(), 1)
        },
        curves=_curves(first),
        heatmaps=heatmaps,
        regions=ours.regions.count,
        steps=ours.train.steps,
        batch_size=ours.train.batch_size,
        parameters=sum(parameter.numel() for parameter in encoder.parameters()),
        seeds=seeds,
        counts=counts,
        machine=machine(),
        command=command,
    )
    write_atomic(output / "heatmaps.png", heatmaps)
    write_atomic(output / "report.html", render(report).encode())
    return table


def _counts(scenes: int, size: int) -> dict[str, int]:
    """The sizes of the evaluation's tasks on so many scenes."""
    tasks = scene_tasks(scenes, size)
    zero_shot, composition, pointing = (tasks[name] for name in ("zero_shot", "composition", "pointing"))
    assert isinstance(zero_shot, Classification)
    assert isinstance(composition, HardNegatives)
    assert isinstance(pointing, PointingGame)
    return {
        "scenes": scenes,
        "zero_shot_images": len(zero_shot.labels),
        "classes": len(zero_shot.classes),
        "comparisons": len(composition.captions),
        "phrases": len(pointing.spans),
    }


def _curves(runs: Mapping[str, Run]) -> dict[str, dict[str, Curve]]:
    curves: dict[str, dict[str, Curve]] = {title: {} for title in CURVES.values()}
    for model, run in runs.items():
        rows = list(read_metrics(run.folder.metrics))
        for key, title in CURVES.items():
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                curves[title][model] = smooth(points, window=3)
    return curves


def _command(seeds: Sequence[int], steps: int | None) -> str:
    parts = ["powerclip quickstart"]
    parts += [f"--seed {seeds[0]}"] if seeds[0] else []
    parts += [f"--seeds {len(seeds)}"] if len(seeds) > 1 else []
    parts += [f"--steps {steps}"] if steps is not None else []
    return " ".join(parts)
