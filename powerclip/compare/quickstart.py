"""The quickstart: train CLIP and PowerCLIP-R on the same scenes, evaluate both, write the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from powerclip.compare.comparison import Line, Outcome, compare, show
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import load, tokenizer_for
from powerclip.errors import UserError
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.scenes import scene_tasks
from powerclip.report.charts import smooth
from powerclip.report.heatmaps import heatmap_figure, png_bytes
from powerclip.report.quickstart_page import Curve, Report, render, signed
from powerclip.report.scene_heatmaps import scene_rows
from powerclip.runtime.distributed import choose_device
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic
from powerclip.train.loop import train
from powerclip.train.metrics import read_metrics
from powerclip.train.recipe import Recipe, differences, load_recipe
from powerclip.train.run_folder import RunFolder

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

RECIPES = {"CLIP": "quickstart/clip", "PowerCLIP-R": "quickstart/powerclip"}
BASELINE, OURS = RECIPES
CURVES = {"clip": "CLIP loss", "alignment": "Alignment loss", "violation": "Violation rate"}
# The same images for every seed: the spread is then that of training alone.
EVALUATION_SEED = 0


@dataclass(frozen=True)
class Trained:
    """A finished run: where it lies, what it was, what came out."""

    folder: RunFolder
    recipe: Recipe
    encoder: DualEncoder
    outcome: Outcome


def run(
    output: Path = Path("runs/quickstart"),
    seed: int = 0,
    steps: int | None = None,
    quiet: bool = False,
    seeds: int = 1,
    scenes: int = 1000,
    console: Console | None = None,
) -> list[Line]:
    """Train, evaluate, print the table, write `report.html`, `results.json` and `heatmaps.png`.

    A run that is already finished is not trained again, an interrupted one continues; either is replaced when the
    recipe has changed since.

    Args:
        output: the folder for everything.
        seed: of the first pair of runs; the next ones count up from it.
        steps: training steps, instead of the recipes' own.
        quiet: print the table alone.
        seeds: pairs of runs; with several, the table shows mean ± standard deviation.
        scenes: test scenes to evaluate on.
        console: where to print; standard output by default.
    """
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another output folder")
    for name, value, least in (("seeds", seeds, 1), ("steps", steps, 1), ("seed", seed, 0)):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, not {value}")
    console = console or Console()
    runs: dict[str, list[Trained]] = {name: [] for name in RECIPES}
    chosen = range(seed, seed + seeds)
    for number in chosen:
        for name in RECIPES:
            runs[name].append(_trained(name, output, number, steps, scenes, quiet, console))
    lines = compare(*([trained.outcome for trained in runs[name]] for name in RECIPES))
    console.print(table(lines, chosen))
    _write(output, runs, lines, chosen, steps)
    console.print(f"Report with curves and heatmaps: {output / 'report.html'}", highlight=False, soft_wrap=True)
    return lines


def table(lines: Sequence[Line], seeds: Sequence[int]) -> Table:
    """The comparison for the terminal; whoever is ahead in bold."""
    over = f"mean ± sd of {len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    made = Table(title=f"CLIP and PowerCLIP-R on the embedded scenes (%, {over})", title_justify="left")
    made.add_column("")
    for column in ("chance", BASELINE, OURS, "difference"):
        made.add_column(column, justify="right", no_wrap=True)
    group = ""
    for line in lines:
        if line.group != group:
            made.add_section()
            group = line.group
            made.add_row(f"[bold]{group}[/bold]")
        cells = {"baseline": show(line.baseline, line.unit), "ours": show(line.ours, line.unit)}
        if line.ahead:
            cells[line.ahead] = f"[bold]{cells[line.ahead]}[/bold]"
        chance = "" if line.chance is None else f"{line.chance:.1f}"
        made.add_row(f"  {line.label}", chance, cells["baseline"], cells["ours"], signed(line.difference, line.unit))
    return made


def _trained(
    name: str, output: Path, seed: int, steps: int | None, scenes: int, quiet: bool, console: Console
) -> Trained:
    # The quickstart measures more than a run does at its end, and does so below.
    overrides = [f"train.seed={seed}", f"data.seed={seed}", "evaluation.scenes=false"]
    overrides += [f"train.steps={steps}"] if steps is not None else []
    recipe = load_recipe(RECIPES[name], overrides)
    folder = RunFolder(output / f"seed-{seed}" / Path(RECIPES[name]).stem)
    encoder = _train(recipe, folder, quiet, console)
    if not quiet:
        console.print(f"evaluating {name} …", highlight=False)
    embedder = Embedder(encoder.to(choose_device("auto")), CaptionTokenizer(tokenizer_for(encoder)))
    tasks = scene_tasks(scenes, encoder.image_size[0], EVALUATION_SEED)
    scored = {task: tasks[task].score(embedder) for task in tasks}
    outcome = Outcome(
        {f"{task}/{metric}": value for task, found in scored.items() for metric, value in found.flat().items()},
        {
            "retrieval": scored["retrieval"].counts["images"],
            "zero_shot": scored["zero_shot"].counts["images"],
            "classes": scored["zero_shot"].counts["classes"],
            "composition": sum(scored["composition"].counts.values()),
            "pointing": scored["pointing"].counts["phrases"],
        },
        training_seconds(folder, recipe.train.batch_size),
    )
    return Trained(folder, recipe, encoder, outcome)


def _train(recipe: Recipe, folder: RunFolder, quiet: bool, console: Console) -> DualEncoder:
    same = False
    if folder.recipe.is_file():
        with suppress(UserError):  # damaged, or written by an older version: as good as another recipe
            same = not differences(folder.read_recipe(), recipe)
    if same and folder.finished:
        if not quiet:
            console.print(f"{folder.root} is already trained", highlight=False)
        return load(str(folder.model))[0]
    overwrite = folder.recipe.is_file() and not same
    return train(recipe, folder.root, resume=same, overwrite=overwrite, quiet=quiet, console=console).encoder


def training_seconds(folder: RunFolder, batch_size: int) -> float:
    """How long the run took, over all its parts if it was interrupted: from the speeds that it logged."""
    seconds, before = 0.0, 0.0
    for row in read_metrics(folder.metrics):
        if "samples_per_second" in row:
            seconds += (row["step"] - before) * batch_size / row["samples_per_second"]
            before = row["step"]
    return seconds


def _write(
    output: Path, runs: dict[str, list[Trained]], lines: Sequence[Line], seeds: Sequence[int], steps: int | None
) -> None:
    """The three files, from the first seed where only one can be shown."""
    first = {name: trained[0] for name, trained in runs.items()}
    heatmaps = png_bytes(heatmap_figure(scene_rows({name: each.encoder for name, each in first.items()})))
    ours = first[OURS]
    report = Report(
        lines=lines,
        curves=_curves(first),
        heatmaps=heatmaps,
        regions=ours.recipe.regions.count,
        steps=ours.recipe.train.steps,
        batch_size=ours.recipe.train.batch_size,
        parameters=sum(parameter.numel() for parameter in ours.encoder.parameters()),
        seeds=seeds,
        counts=ours.outcome.counts,
        machine=machine(),
        command=_command(seeds, steps),
    )
    results: dict[str, Any] = {
        "command": report.command,
        "machine": report.machine,
        "steps": report.steps,
        "batch_size": report.batch_size,
        "models": {
            name: [
                {"seed": seed, "seconds": each.outcome.seconds, "scores": each.outcome.scores}
                for seed, each in zip(seeds, trained, strict=True)
            ]
            for name, trained in runs.items()
        },
    }
    write_atomic(output / "heatmaps.png", heatmaps)
    write_atomic(output / "results.json", json.dumps(results, indent=1).encode())
    write_atomic(output / "report.html", render(report).encode())


def _curves(runs: dict[str, Trained]) -> dict[str, dict[str, Curve]]:
    curves: dict[str, dict[str, Curve]] = {title: {} for title in CURVES.values()}
    for name, trained in runs.items():
        rows = list(read_metrics(trained.folder.metrics))
        for key, title in CURVES.items():
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                curves[title][name] = smooth(points, window=3)
    return curves


def _command(seeds: Sequence[int], steps: int | None) -> str:
    parts = ["powerclip quickstart"]
    parts += [f"--seed {seeds[0]}"] if seeds[0] else []
    parts += [f"--seeds {len(seeds)}"] if len(seeds) > 1 else []
    parts += [f"--steps {steps}"] if steps is not None else []
    return " ".join(parts)
