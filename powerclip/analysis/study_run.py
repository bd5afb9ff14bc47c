"""Run a study: every setting with every seed in one process, finished runs kept, the table brought up to date.

A run that a study beside this one has finished is copied instead of trained.

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
from powerclip.analysis.study_shared import FinishedRuns, finished, take_over
from powerclip.analysis.study_table import Outcomes, failures, markdown, summary, terminal
from powerclip.errors import UserError
from powerclip.files import write_whole
from powerclip.train.data import CorpusStore
from powerclip.train.evaluation import describe
from powerclip.train.loop import train
from powerclip.train.progress import duration
from powerclip.train.recipe import Recipe
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
    store: CorpusStore | None = None,
    shared: FinishedRuns | None = None,
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
        store: the corpora in memory, where several studies share them.
        shared: the finished runs of the studies beside this one, where several studies look for them.

    Raises:
        UserError: every run failed, the folder holds something else, or a finished run has no model to be tested.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another --output folder")
    console = console or Console()

    def say(text: str) -> None:
        if not quiet:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    shared = shared or FinishedRuns()
    held_out = read_held_out(test)
    if held_out and not keep_models:
        _check_models(study, output, seeds, shared)
    keep_models = keep_models or bool(held_out)
    store = store or CorpusStore(say)
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
                results, note = _results(recipe, folder, output, shared, keep_models)
                if results is None:
                    results = _run(recipe, folder, store, quiet, console)
                    note = duration(results.seconds)
            except UserError as error:
                outcomes[setting.name][seed] = str(error)
                say(f"{head}failed: {error}")
                continue
            shared.add(folder, recipe)
            outcomes[setting.name][seed] = results
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


def _results(
    recipe: Recipe, folder: RunFolder, output: Path, shared: FinishedRuns, keep_models: bool
) -> tuple[Results | None, str]:
    """The results of the run where it need not be trained, and a note where they are from."""
    kept = finished(folder, recipe)
    if kept and (folder.model.is_dir() or not keep_models):
        return kept, "finished before"
    source = shared.find(recipe, output, model=keep_models)
    if source is None:
        return None, ""
    take_over(source, folder, recipe, model=keep_models)
    setting, study = source.root.parent, source.root.parents[1]
    return read_results(folder.results), f"taken from {setting.name if study == output.resolve() else study.name}"


def _check_models(study: Study, output: Path, seeds: Sequence[int], shared: FinishedRuns) -> None:
    """UserError when a finished run has left no model, here or beside: training it again is for the user to decide."""
    folders = [
        (setting, seed, RunFolder(output / setting.name / f"seed-{seed}"))
        for setting in study.settings
        for seed in seeds
    ]
    gone = [
        folder.root
        for setting, seed, folder in folders
        if not folder.model.is_dir()
        and finished(folder, setting.at(seed))
        and not shared.find(setting.at(seed), output, model=True)
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
