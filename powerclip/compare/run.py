"""Run a study: every setting with every seed, finished runs kept, the table brought up to date.

A run that a study in a folder beside has finished is copied instead of trained. Held-out data, where some are named,
are measured once, when all runs are finished.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from powerclip.compare.cost import RunCosts
from powerclip.compare.held_out import measure_held_out, read_held_out
from powerclip.compare.pool import Processes, train_in_turn
from powerclip.compare.study import Run, RunFailure, Studies, Study, StudyResults
from powerclip.compare.table import (
    COMPARED,
    MEASURES,
    describe_seeds,
    failures,
    markdown_page,
    step_time,
    study_table,
    summary,
)
from powerclip.errors import UserError
from powerclip.report.curves_page import curves_page
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic
from powerclip.runtime.locks import LOCK_FILE
from powerclip.runtime.progress import duration, print_line
from powerclip.train.data_cache import DataCache
from powerclip.train.evaluation import describe
from powerclip.train.metrics import read_metrics
from powerclip.train.recipe import FREE_ON_RESUME, Recipe, differences
from powerclip.train.results import OutdatedResults, Results, read_results
from powerclip.train.run_folder import RunFolder


class FinishedRuns:
    """The finished runs of all studies in a folder, by what they have computed.

    The folder is searched once; `add` registers runs that finish later. Several studies may share one object.
    """

    def __init__(self) -> None:
        self._runs: dict[str, list[RunFolder]] = {}
        self._searched: set[Path] = set()

    def add(self, folder: RunFolder, recipe: Recipe) -> None:
        """Register a run that has finished."""
        folders, folder = self._runs.setdefault(identity(recipe), []), RunFolder(folder.root.resolve())
        if folder not in folders:
            folders.append(folder)

    def find(self, recipe: Recipe, study: Path, *, model: bool = False) -> RunFolder | None:
        """A finished run with this recipe in a study's folder or beside it; with `model`, one with its model."""
        studies = study.resolve().parent
        self._search(studies)
        for folder in self._runs.get(identity(recipe), []):
            # Checked again: it may have been replaced since.
            if folder.root.parents[2] == studies and finished(folder, recipe) and (folder.model.is_dir() or not model):
                return folder
        return None

    def _search(self, studies: Path) -> None:
        if studies in self._searched:
            return
        self._searched.add(studies)
        with suppress(OSError):  # does not exist yet, or is not readable
            for table in sorted(studies.glob("*/table.md")):  # that of a study; other folders are left alone
                for results in sorted(table.parent.glob("*/*/results.json")):
                    folder = RunFolder(results.parent)
                    with suppress(UserError, OSError):
                        self.add(folder, folder.read_recipe())


@dataclass(frozen=True)
class RunOptions:
    """How the runs of studies are made."""

    keep_models: bool = False  # save the trained models too; a finished run that has none is trained again
    resume: bool = False  # keep checkpoints, and continue a run that was interrupted instead of training it again
    log_steps: bool = False  # print logged steps also where there is no terminal; else one line for each run
    quiet: bool = False  # print only the tables
    console: Console = field(default_factory=Console)
    cache: DataCache | None = None  # the corpora in memory, where several studies share them
    finished: FinishedRuns = field(default_factory=FinishedRuns)
    processes: Processes | None = None  # to train several runs at a time; without, or with one, they run here in turn

    def say(self, text: str) -> None:
        """Print a line of information."""
        if not self.quiet:
            print_line(self.console, text)


class RunTable:
    """The results of a study's runs so far, and the files that show them."""

    def __init__(self, study: Study, output: Path, seeds: Sequence[int], options: RunOptions):
        self._study, self._output, self._seeds, self._options = study, output, seeds, options
        self.results: StudyResults = {setting.name: {} for setting in study.settings}
        self._costs = RunCosts()

    def note(self, run: Run, result: Results | RunFailure, remark: str = "") -> None:
        """Add the result of a run, and print it; a remark is printed instead of the duration."""
        self.results[run.setting][run.seed] = result
        done, total = sum(map(len, self.results.values())), len(self._study.settings) * len(self._seeds)
        head = f"[{done:{len(str(total))}d}/{total}] {run.setting}, seed {run.seed}: "
        if isinstance(result, RunFailure):
            self._options.say(f"{head}failed: {result.reason}")
            return
        self._options.finished.add(run.folder, run.recipe)
        scores = describe(result.scores) or "nothing measured"
        self._options.say(f"{head}{scores}  ({remark or duration(result.seconds)})")

    def look_up(self, run: Run) -> bool:
        """Add the result of a run that need not be trained; False when it has to be."""
        try:
            finished_before = self._find(run)
        except UserError as error:
            self.note(run, RunFailure(str(error)))
            return True
        if finished_before is not None:
            self.note(run, *finished_before)
        return finished_before is not None

    def _find(self, run: Run) -> tuple[Results, str] | None:
        """The results of a run that is finished here or beside, and a remark where they are from."""
        model = self._options.keep_models
        results = finished(run.folder, run.recipe)
        if results and (run.folder.model.is_dir() or not model):
            return results, "finished before"
        source = self._options.finished.find(run.recipe, self._output, model=model)
        if source is None:
            return None
        copy_run(source, run.folder, run.recipe, model=model)
        setting, study = source.root.parent.name, source.root.parents[1]
        return read_results(
            run.folder.results
        ), f"taken from {setting if study == self._output.resolve() else study.name}"

    def write(self) -> None:
        """Bring `table.md`, `results.json` and `curves.html` up to date."""
        study, results = self._study, self.results
        legend = (
            f"Percent, mean ± standard deviation over seeds; Δ is the difference to {study.baseline}, with the ratio "
            "and the p-value of a paired t-test over seeds. Violation and empty are those of the last step, time is "
            "the median of a training step, where a run had its GPU to itself."
        )
        footer = [f"{describe_seeds(self._seeds)}; {machine()}.", *failures(results)]
        page = markdown_page(study, study_table(study, results), legend, "\n".join(footer))
        content: dict[str, Any] = {
            "about": study.about,
            "baseline": study.baseline,
            "seeds": list(self._seeds),
            "machine": machine(),
            "settings": {
                setting.name: {
                    "about": setting.about,
                    "summary": {
                        **summary(study, results, setting.name, MEASURES),
                        "seconds_per_step": step_time(results, setting.name),
                    },
                    "runs": {
                        str(seed): {"error": result.reason} if isinstance(result, RunFailure) else asdict(result)
                        for seed, result in results[setting.name].items()
                    },
                }
                for setting in study.settings
            },
        }
        logs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in results}
        for run in study.runs(self._output, self._seeds):
            result = results[run.setting].get(run.seed)
            if isinstance(result, Results):
                rows = list(read_metrics(run.folder.metrics))
                logs[run.setting].append(self._costs.add(rows, run.recipe, result.seconds_per_step))
        write_atomic(self._output / "table.md", page.encode())
        write_atomic(self._output / "results.json", (json.dumps(content, indent=1) + "\n").encode())
        write_atomic(self._output / "curves.html", curves_page(logs).encode())


def run_study(study: Study, output: Path, seeds: Sequence[int], options: RunOptions) -> StudyResults:
    """Run what is not finished yet, and write `table.md`, `results.json` and `curves.html`.

    A run whose recipe has changed since is run again. One that fails for a reason of its own, such as a loss that is no
    longer finite, is noted in the table, and the rest goes on.

    Args:
        study: what to compare.
        output: the study's folder.
        seeds: of weights, regions and data alike.
        options: how the runs are made.

    Raises:
        UserError: every run failed, or the folder holds something else.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; choose another --output folder")
    table = RunTable(study, output, seeds, options)
    unfinished: dict[str, list[Run]] = {}  # by identity: runs that compute the same are trained once
    for run in study.runs(output, seeds):
        run = replace(run, recipe=_recipe_for_study(run.recipe, options), resume=options.resume)
        if not table.look_up(run):
            if _is_outdated(run.folder):
                options.say(f"{run.folder.root}: finished by another version, with other metrics: it is trained again")
            unfinished.setdefault(identity(run.recipe), []).append(run)
    if any(table.results.values()):
        table.write()
    same = {runs[0]: runs[1:] for runs in unfinished.values()}
    if options.processes and options.processes.count > 1:
        trained = options.processes.train(list(same), options.console, quiet=options.quiet)
    else:
        cache = options.cache or DataCache(options.say)
        quiet = options.quiet or not (options.console.is_terminal or options.log_steps)
        trained = train_in_turn(list(same), cache, options.console, quiet=quiet)
    for run, result in trained:
        table.note(run, result)
        for other in same[run]:
            if isinstance(result, RunFailure):
                table.note(other, result)
            else:
                table.look_up(other)
        table.write()
    ended = [result for runs in table.results.values() for result in runs.values()]
    reasons = [result.reason for result in ended if isinstance(result, RunFailure)]
    if len(reasons) == len(ended):
        raise UserError(f"every run failed; the first: {reasons[0]}")
    table.write()
    return table.results


def compare_study(
    study: Study, output: Path, seeds: Sequence[int], options: RunOptions, test: Sequence[Path] = ()
) -> StudyResults:
    """Run a study and print its table. With `test`, measure the models on held-out data: `test.md` and `test.json`.

    Raises:
        UserError: as `run_study`, or a finished run has no model to be tested.
    """
    held_out = read_held_out(test)
    if held_out:
        if not options.keep_models:
            _check_models(study, output, seeds, options.finished)
        options = replace(options, keep_models=True)
    results = run_study(study, output, seeds, options)
    study_table(study, results, COMPARED).print(options.console)
    for line in failures(results):
        print_line(options.console, line, style="yellow")
    options.say(f"Table, numbers and curves: {output / 'table.md'}, results.json, curves.html")
    if held_out:
        measure_held_out(study, output, results, held_out, quiet=options.quiet, console=options.console)
    return results


def compare_studies(
    studies: Studies, output: Path, seeds: Sequence[int], options: RunOptions, test: Sequence[Path] = ()
) -> None:
    """Compare one study after the other, each into a folder of its name in `output`.

    Corpora stay in memory, and no run is trained twice. A study that fails is reported, and the others go on.

    Raises:
        UserError: at the end, when a study has failed.
    """
    options = replace(options, cache=options.cache or DataCache(None if options.quiet else options.say))
    failed: dict[str, str] = {}
    for name, study in studies.items():  # at once, not after hours of other studies
        if isinstance(study, str):
            failed[name] = study
            print_line(options.console, f"{name}: failed: {study}", "yellow")
    for number, (name, study) in enumerate(studies.items(), 1):
        if isinstance(study, str):
            continue
        print_line(options.console, f"Study {number}/{len(studies)}: {name}", "bold")
        try:
            compare_study(study, output / name, seeds, options, test)
        except UserError as error:
            failed[name] = str(error)
            print_line(options.console, f"{name}: failed: {error}", "yellow")
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise UserError(f"{len(failed)} of {len(studies)} studies failed: {reasons}")


def finished(folder: RunFolder, recipe: Recipe) -> Results | None:
    """The results of a run that has reached its end with the same recipe and the same evaluation, else None."""
    if not folder.finished or not folder.holds_run():
        return None
    try:
        begun = folder.read_recipe()
        same = not differences(begun, recipe, counted=False) and begun.evaluation == recipe.evaluation
        return read_results(folder.results) if same else None
    except UserError:  # damaged, or written by an older version: as good as another recipe
        return None


def identity(recipe: Recipe) -> str:
    """What a run computes and measures, as text: equal for two recipes that give the same results."""
    content = asdict(recipe)
    for name in FREE_ON_RESUME:
        section, key = name.split(".")
        if section != "evaluation":
            del content[section][key]
    if recipe.train.epochs is not None and recipe.data.samples is None:
        del content["train"]["steps"]  # they follow from the data, which a run counts when it begins
    return json.dumps(content, sort_keys=True)


def copy_run(source: RunFolder, folder: RunFolder, recipe: Recipe, *, model: bool) -> None:
    """Copy a finished run, with `model` its model too, over whatever run the folder holds.

    Raises:
        UserError: the folder holds something that is not a run, or a file could not be copied.
    """
    skipped = {source.results, source.checkpoints, source.root / LOCK_FILE} | (set() if model else {source.model})
    with folder.lock():
        folder.check_free(overwrite=True)
        folder.begin(recipe)
        try:
            shutil.copytree(
                source.root,
                folder.root,
                ignore=lambda inside, names: {name for name in names if Path(inside, name) in skipped},
                dirs_exist_ok=True,
            )
        except shutil.Error as error:  # one entry for each file: its path, the copy's, why
            raise UserError(f"{source.root} could not be copied: {error.args[0][0][2]}") from None
        write_atomic(folder.results, source.results.read_bytes())  # last, as a run does: now it is finished


def _check_models(study: Study, output: Path, seeds: Sequence[int], shared: FinishedRuns) -> None:
    """UserError when a finished run has left no model, here or beside: training it again is for the user to decide."""
    runs = study.runs(output, seeds)
    lacking = [
        run.folder.root
        for run in runs
        if not run.folder.model.is_dir()
        and finished(run.folder, run.recipe)
        and not shared.find(run.recipe, output, model=True)
    ]
    if lacking:
        raise UserError(
            f"--test needs the models of finished runs, and {len(lacking)} of {len(runs)} were not kept (the first: "
            f"{lacking[0]}); the same command with --keep-models trains these again and keeps them"
        )


def _is_outdated(folder: RunFolder) -> bool:
    """Whether a folder's results are those of another version."""
    if not folder.finished:
        return False
    try:
        read_results(folder.results)
    except OutdatedResults:
        return True
    except UserError:
        return False
    return False


def _recipe_for_study(recipe: Recipe, options: RunOptions) -> Recipe:
    """The recipe of a run in a study: checkpoints and the model are saved only where the options say so."""
    checkpoint_every = recipe.train.checkpoint_every if options.resume else 0
    return replace(
        recipe, train=replace(recipe.train, checkpoint_every=checkpoint_every, save_model=options.keep_models)
    )
