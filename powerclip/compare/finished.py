"""Runs that studies share: what one has trained, the studies whose folders lie beside it need not train again."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.train.recipe import FREE_ON_RESUME, Recipe, differences
from powerclip.train.results import Results, read_results
from powerclip.train.run_folder import RunFolder


def finished(folder: RunFolder, recipe: Recipe) -> Results | None:
    """The results of a run that has reached its end with the same recipe and the same evaluation, else None."""
    if not folder.finished or not folder.recipe.is_file():
        return None
    try:
        begun = folder.read_recipe()
        same = not differences(begun, recipe, counted=False) and begun.evaluation == recipe.evaluation
        return read_results(folder.results) if same else None
    except UserError:  # damaged, or written by an older version: as good as another recipe
        return None


def identity(recipe: Recipe) -> str:
    """What a run computes and measures, as text: the same for two recipes whose results are each other's."""
    values = asdict(recipe)
    for name in FREE_ON_RESUME:
        section, key = name.split(".")
        if section != "evaluation":
            del values[section][key]
    if recipe.train.epochs is not None and recipe.data.samples is None:
        del values["train"]["steps"]  # they follow from the data, which a run counts when it begins
    return json.dumps(values, sort_keys=True)


class FinishedRuns:
    """The finished runs of all studies in a folder, by what they have computed.

    The folder is gone through once; what finishes later is told by `add`. Hand the same to several studies.
    """

    def __init__(self) -> None:
        self._runs: dict[str, list[RunFolder]] = {}
        self._looked_in: set[Path] = set()

    def add(self, folder: RunFolder, recipe: Recipe) -> None:
        """Note a run that has finished."""
        known, folder = self._runs.setdefault(identity(recipe), []), RunFolder(folder.root.resolve())
        if folder not in known:
            known.append(folder)

    def find(self, recipe: Recipe, study: Path, *, model: bool = False) -> RunFolder | None:
        """A finished run with this recipe in a study's folder or beside it; with `model`, one with its model."""
        studies = study.resolve().parent
        self._look_in(studies)
        for folder in self._runs.get(identity(recipe), []):
            # Asked again: it may have been replaced since.
            if folder.root.parents[2] == studies and finished(folder, recipe) and (folder.model.is_dir() or not model):
                return folder
        return None

    def _look_in(self, studies: Path) -> None:
        if studies in self._looked_in:
            return
        self._looked_in.add(studies)
        with suppress(OSError):  # not there yet, or not ours to read
            for table in sorted(studies.glob("*/table.md")):  # a study's; whatever else lies here is left alone
                for results in sorted(table.parent.glob("*/seed-*/results.json")):
                    folder = RunFolder(results.parent)
                    with suppress(UserError, OSError):
                        self.add(folder, folder.read_recipe())


def take_over(source: RunFolder, folder: RunFolder, recipe: Recipe, *, model: bool) -> None:
    """Copy a finished run, with `model` its model too, over whatever run the folder holds.

    Raises:
        UserError: the folder holds something that is not a run, or a file could not be copied.
    """
    folder.check_free(overwrite=True)
    folder.begin(recipe)
    left = {source.results, source.checkpoints} | (set() if model else {source.model})
    try:
        shutil.copytree(
            source.root,
            folder.root,
            ignore=lambda inside, names: {name for name in names if Path(inside, name) in left},
            dirs_exist_ok=True,
        )
    except shutil.Error as error:  # one entry for each file: its path, the copy's, why
        raise UserError(f"{source.root} could not be copied: {error.args[0][0][2]}") from None
    write_atomic(folder.results, source.results.read_bytes())  # last, as a run does: now it is finished
