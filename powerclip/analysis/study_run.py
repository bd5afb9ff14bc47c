"""Run a study: every setting with every seed in one process, finished runs kept, the table brought up to date.

Held-out data, where some are named, are looked at once, when all runs are finished.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from powerclip.analysis.machine import machine
from powerclip.analysis.study import Study
from powerclip.analysis.study_curves import curves_page
from powerclip.analysis.study_held_out import measure_held_out, read_held_out
from powerclip.analysis.study_table import Outcomes, failures, markdown, summary, terminal
from powerclip.errors import UserError
from powerclip.files import write_whole
from powerclip.train.data import CorpusStore
from powerclip.train.evaluation import describe
from powerclip.train.loop import train
from powerclip.train.progress import duration
from powerclip.train.recipe import Recipe, differences, parse_recipe
from powerclip.train.results import Results, read_results
from powerclip.train.run_folder import RunFolder


def run_study(
    study: Study,
    output: Path,
    seeds: Sequence[int],
    *,
    keep_models: bool = False,
    test: Sequence[Path] = (),
    quiet: bool = False,
    console: Console | None = None,
) -> Outcomes:
    """Run what is not finished yet, and write `table.md`, `results.json` and `curves.html`.

    A run whose recipe has changed since is run again. One that fails for a reason of its own, such as a loss that is no
    longer finite, is noted in the table, and the rest goes on.

    Args:
        study: what to compare.
        output: the folder; run n of a setting lies in `SETTING/seed-n`.
        seeds: of weights, regions and data alike.
        keep_models: save the trained models too; a finished run that has not is run again.
        test: held-out data, as `powerclip evaluate` reads them. All models are measured on them at the end, which makes
            `test.md` and `test.json`; what is run for it keeps its model.
        quiet: print the tables alone.
        console: where to print; standard output by default.

    Raises:
        UserError: every run failed, the folder holds something else, or a finished run has no model to be tested.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another --output folder")
    console = console or Console()

    def say(text: str) -> None:
        if not quiet:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    held_out = read_held_out(test)
    if held_out and not keep_models:
        _check_models(study, output, seeds)
    keep_models = keep_models or bool(held_out)
    store = CorpusStore(say)
    outcomes: Outcomes = {setting.name: {} for setting in study.settings}
    total, done = len(study.settings) * len(seeds), 0
    # Seed by seed: after the first, every setting has a number.
    for seed in seeds:
        for setting in study.settings:
            done += 1
            folder = RunFolder(output / setting.name / f"seed-{seed}")
            head = f"[{done:{len(str(total))}d}/{total}] {setting.name}, seed {seed}: "
            recipe = _for_study(setting.at(seed), keep_models)
            try:
                kept = finished(folder, recipe)
                if keep_models and not folder.model.is_dir():
                    kept = None
                results = kept or _run(recipe, folder, store, quiet, console)
            except UserError as error:
                outcomes[setting.name][seed] = str(error)
                say(f"{head}failed: {error}")
                continue
            outcomes[setting.name][seed] = results
            note = "finished before" if kept else duration(results.seconds)
            say(f"{head}{describe(results.scores) or 'nothing measured'}  ({note})")
            _write(study, output, seeds, outcomes)
    reasons = [outcome for runs in outcomes.values() for outcome in runs.values() if isinstance(outcome, str)]
    if len(reasons) == total:
        raise UserError(f"every run failed; the first: {reasons[0]}")
    _write(study, output, seeds, outcomes)
    for row in terminal(study, outcomes):
        console.print(row, highlight=False, soft_wrap=True)
    for line in failures(outcomes):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    say(f"Table, numbers and curves: {output / 'table.md'}, results.json, curves.html")
    if held_out:
        measure_held_out(study, output, outcomes, held_out, quiet=quiet, console=console)
    return outcomes


def finished(folder: RunFolder, recipe: Recipe) -> Results | None:
    """The results of a run that has reached its end with the same recipe and the same evaluation, else None."""
    if not folder.finished or not folder.recipe.is_file():
        return None
    try:
        begun = parse_recipe(folder.recipe.read_text(encoding="utf-8"), str(folder.recipe))
        same = not differences(begun, recipe) and begun.evaluation == recipe.evaluation
        return read_results(folder.results) if same else None
    except UserError:  # written by an older version: as good as another recipe
        return None


def _check_models(study: Study, output: Path, seeds: Sequence[int]) -> None:
    """UserError when a finished run has left no model: training it again is for the user to decide."""
    folders = [
        (setting, seed, RunFolder(output / setting.name / f"seed-{seed}"))
        for setting in study.settings
        for seed in seeds
    ]
    gone = [
        folder.root
        for setting, seed, folder in folders
        if not folder.model.is_dir() and finished(folder, setting.at(seed))
    ]
    if gone:
        raise UserError(
            f"--test needs the models of finished runs, and {len(gone)} of {len(folders)} were not kept (the first: "
            f"{gone[0]}); the same command with --keep-models trains these again and keeps them"
        )


def _for_study(recipe: Recipe, keep_models: bool) -> Recipe:
    """What a run of a study need not leave behind: it is cheaper to run again than to keep."""
    return replace(recipe, train=replace(recipe.train, checkpoint_every=0, save_model=keep_models))


def _run(recipe: Recipe, folder: RunFolder, store: CorpusStore, quiet: bool, console: Console) -> Results:
    silent = quiet or not console.is_terminal  # in a log, one line for each run is enough
    return train(recipe, folder.root, overwrite=True, quiet=silent, console=console, store=store).results


def _write(study: Study, output: Path, seeds: Sequence[int], outcomes: Outcomes) -> None:
    footer = f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))}); {machine()}."
    page = "\n".join([markdown(study, outcomes), footer, *failures(outcomes)]) + "\n"
    results: dict[str, Any] = {
        "about": study.about,
        "baseline": study.baseline,
        "seeds": list(seeds),
        "machine": machine(),
        "settings": {
            setting.name: {
                "about": setting.about,
                "summary": summary(study, outcomes, setting.name),
                "runs": {
                    str(seed): {"error": outcome} if isinstance(outcome, str) else asdict(outcome)
                    for seed, outcome in outcomes[setting.name].items()
                },
            }
            for setting in study.settings
        },
    }
    write_whole(output / "table.md", page.encode())
    write_whole(output / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    logs = {
        name: [
            RunFolder(output / name / f"seed-{seed}").metrics
            for seed, outcome in runs.items()
            if isinstance(outcome, Results)
        ]
        for name, runs in outcomes.items()
    }
    write_whole(output / "curves.html", curves_page(logs).encode())
