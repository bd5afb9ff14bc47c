"""Run a study: every setting with every seed, finished runs kept, the table brought up to date.

A run that a study beside this one has finished is copied instead of trained. The others are trained one after the other
in this process, or several at a time in others.

Held-out data, where some are named, are looked at once, when all runs are finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from powerclip.compare.finished import FinishedRuns, finished, identity, take_over
from powerclip.compare.held_out import measure_held_out, read_held_out
from powerclip.compare.pool import Processes, Run
from powerclip.compare.study import Study
from powerclip.compare.table import Outcomes, failures, markdown, summary, terminal
from powerclip.errors import UserError
from powerclip.report.curves_page import curves_page
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import duration
from powerclip.train.data import CorpusStore
from powerclip.train.evaluation import describe
from powerclip.train.loop import train
from powerclip.train.recipe import Recipe
from powerclip.train.results import Results, read_results
from powerclip.train.run_folder import RunFolder


@dataclass(frozen=True)
class _Place:
    """One cell of the study: a setting with a seed."""

    setting: str
    seed: int
    folder: RunFolder
    recipe: Recipe


class _Ledger:
    """The outcomes of a study's runs, as they become known."""

    def __init__(
        self,
        study: Study,
        output: Path,
        seeds: Sequence[int],
        shared: FinishedRuns,
        keep_models: bool,
        say: Callable[[str], None],
    ):
        self._study, self._output, self._seeds, self._say = study, output, seeds, say
        self._shared, self._keep_models = shared, keep_models
        self.outcomes: Outcomes = {setting.name: {} for setting in study.settings}

    def places(self) -> Iterator[_Place]:
        """All runs, seed by seed: after the first, every setting has a number."""
        for seed in self._seeds:
            for setting in self._study.settings:
                folder = RunFolder(self._output / setting.name / f"seed-{seed}")
                yield _Place(setting.name, seed, folder, _for_study(setting.at(seed), self._keep_models))

    def note(self, place: _Place, outcome: Results | str, remark: str = "") -> None:
        """A run has ended so; `remark` instead of its duration."""
        self.outcomes[place.setting][place.seed] = outcome
        done, total = sum(map(len, self.outcomes.values())), len(self._study.settings) * len(self._seeds)
        head = f"[{done:{len(str(total))}d}/{total}] {place.setting}, seed {place.seed}: "
        if isinstance(outcome, str):
            self._say(f"{head}failed: {outcome}")
            return
        self._shared.add(place.folder, place.recipe)
        self._say(f"{head}{describe(outcome.scores) or 'nothing measured'}  ({remark or duration(outcome.seconds)})")

    def look_up(self, place: _Place) -> bool:
        """Note a run that need not be trained; False when it has to be."""
        try:
            results, remark = _results(place.recipe, place.folder, self._output, self._shared, self._keep_models)
        except UserError as error:
            self.note(place, str(error))
            return True
        if results is not None:
            self.note(place, results, remark)
        return results is not None

    def write(self) -> None:
        """Bring the table, the numbers and the curves up to date."""
        _write(self._study, self._output, self._seeds, self.outcomes)


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
    processes: Processes | None = None,
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
        processes: where to train several runs at a time; without them, or with one, runs are trained here in turn.

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
    ledger = _Ledger(study, output, seeds, shared, keep_models, say)
    left: dict[str, list[_Place]] = {}  # by what is computed: the same is trained once
    for place in ledger.places():
        if not ledger.look_up(place):
            left.setdefault(identity(place.recipe), []).append(place)
    if any(ledger.outcomes.values()):
        ledger.write()
    runs = {Run(same[0].recipe, same[0].folder.root): same for same in left.values()}
    if processes and processes.count > 1:
        trained = processes.train(list(runs), console, quiet=quiet)
    else:
        trained = _train_here(list(runs), store, quiet, console)
    for run, outcome in trained:
        first, *others = runs[run]
        ledger.note(first, outcome)
        for place in others:
            if isinstance(outcome, str):
                ledger.note(place, outcome)
            else:
                ledger.look_up(place)
        ledger.write()
    outcomes = ledger.outcomes
    reasons = [outcome for ended in outcomes.values() for outcome in ended.values() if isinstance(outcome, str)]
    if len(reasons) == sum(map(len, outcomes.values())):
        raise UserError(f"every run failed; the first: {reasons[0]}")
    ledger.write()
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


def _train_here(
    runs: Sequence[Run], store: CorpusStore, quiet: bool, console: Console
) -> Iterator[tuple[Run, Results | str]]:
    """The results of each run, or why there are none, one after the other."""
    silent = quiet or not console.is_terminal  # in a log, one line for each run is enough
    for run in runs:
        try:
            done = train(run.recipe, run.folder, overwrite=True, quiet=silent, console=console, store=store)
            yield run, done.results
        except UserError as error:
            yield run, str(error)


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
    write_atomic(output / "table.md", page.encode())
    write_atomic(output / "results.json", (json.dumps(results, indent=1) + "\n").encode())
    logs = {
        name: [
            RunFolder(output / name / f"seed-{seed}").metrics
            for seed, outcome in runs.items()
            if isinstance(outcome, Results)
        ]
        for name, runs in outcomes.items()
    }
    write_atomic(output / "curves.html", curves_page(logs).encode())
