"""Several studies in one command: corpora stay in memory, towers compiled, and no run is trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from powerclip.compare.finished import FinishedRuns
from powerclip.compare.pool import Processes
from powerclip.compare.run import run_study
from powerclip.compare.study import Study, is_study, read_study
from powerclip.errors import UserError, nearest
from powerclip.train.data import CorpusStore
from powerclip.train.recipe import find_recipe

Studies = dict[str, Study | str]  # name → the study, or why it could not be read


def are_studies(files: Sequence[str]) -> bool:
    """Whether the files are several studies; several recipes, or one file of either kind, are not.

    Raises:
        UserError: some are studies and some are not, or two studies have the same name.
    """
    if len(files) < 2:
        return False
    studies = [name for name in files if is_study(name)]
    for name in files if studies else ():
        if name in studies:
            continue
        try:
            find_recipe(name)
        except UserError:
            raise UserError(f"no study file {name}") from None
        raise UserError(
            f"{studies[0]} is a study and {name} a recipe: compare either studies or recipes in one command"
        )
    twice, count = Counter(Path(name).stem for name in studies).most_common(1)[0] if studies else ("", 0)
    if count > 1:
        raise UserError(f"two studies are called {twice}: a study's folder is named by its file, rename one")
    return bool(studies)


def read_studies(files: Sequence[str], overrides: Sequence[str] = (), only: Sequence[str] = ()) -> Studies:
    """The studies in the files, by the files' stems. `only` keeps the named settings of each, where it has them.

    Raises:
        UserError: a setting of `only` is in no study.
    """
    studies: Studies = {}
    for name in files:
        try:
            studies[Path(name).stem] = read_study([name], overrides)
        except UserError as error:
            studies[Path(name).stem] = str(error)
    if not only:
        return studies
    known = {setting.name for study in studies.values() if isinstance(study, Study) for setting in study.settings}
    for name in only:
        if name not in known:
            hint = nearest(name, sorted(known)) or f"; known: {', '.join(sorted(known))}"
            raise UserError(f"--only: no setting {name!r} in any of the studies{hint}")
    chosen: Studies = {}
    for stem, study in studies.items():
        if isinstance(study, str):
            chosen[stem] = study
        elif there := [name for name in only if any(setting.name == name for setting in study.settings)]:
            chosen[stem] = study.only(there)
    return chosen


def run_studies(
    studies: Studies,
    output: Path,
    seeds: Sequence[int],
    *,
    keep_models: bool = False,
    test: Sequence[Path] = (),
    quiet: bool = False,
    console: Console | None = None,
    processes: Processes | None = None,
) -> None:
    """Run one study after the other, each as `run_study` does, into a folder of its name in `output`.

    A study that fails is reported, and the others go on.

    Raises:
        UserError: at the end, when a study has failed.
    """
    console = console or Console()

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    store, shared = CorpusStore(None if quiet else say), FinishedRuns()
    failed: dict[str, str] = {}
    for name, study in studies.items():  # at once, not after hours of other studies
        if isinstance(study, str):
            failed[name] = study
            say(f"{name}: failed: {study}", "yellow")
    for number, (name, study) in enumerate(studies.items(), 1):
        if isinstance(study, str):
            continue
        say(f"Study {number}/{len(studies)}: {name}", "bold")
        try:
            run_study(
                study,
                output / name,
                seeds,
                keep_models=keep_models,
                test=test,
                quiet=quiet,
                console=console,
                store=store,
                shared=shared,
                processes=processes,
            )
        except UserError as error:
            failed[name] = str(error)
            say(f"{name}: failed: {error}", "yellow")
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise UserError(f"{len(failed)} of {len(studies)} studies failed: {reasons}")
