"""A study: settings to compare over seeds, as one YAML file or as several recipes.

base: captions10k/small       # a recipe, by its path from this file or by its name
baseline: clip                # the setting that the others are compared with; the first by default
settings:
  clip: {objective: clip}
  powerclip: {}
  paper:
    about: the loss as printed
    alignment: {preset: paper}
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from powerclip.errors import UserError, nearest
from powerclip.runtime.shipped import find_yaml
from powerclip.settings import parse_yaml
from powerclip.train.recipe import Recipe, find_recipe, load_recipe
from powerclip.train.results import Results
from powerclip.train.run_folder import RunFolder

_KEYS = ("about", "base", "baseline", "settings")
_NAME = re.compile(r"\w[\w .,=+-]*")  # a setting's name is also its folder's


@dataclass(frozen=True)
class Setting:
    """One row of the comparison."""

    name: str
    recipe: Recipe
    about: str = ""

    def at(self, seed: int) -> Recipe:
        """The recipe with that seed for weights, regions and data: all settings of a seed see the same."""
        return replace(
            self.recipe, train=replace(self.recipe.train, seed=seed), data=replace(self.recipe.data, seed=seed)
        )


@dataclass(frozen=True, eq=False)
class Run:
    """One cell of a study: a setting with a seed."""

    setting: str
    seed: int
    recipe: Recipe
    folder: RunFolder
    resume: bool = False  # where it was interrupted, instead of from the first step


@dataclass(frozen=True)
class RunFailure:
    """Why a run has no results."""

    reason: str


StudyResults = dict[str, dict[int, Results | RunFailure]]  # setting → seed → results of its run


@dataclass(frozen=True)
class Study:
    """What to compare, and with what."""

    settings: tuple[Setting, ...]
    baseline: str
    about: str = ""
    layout: str = "{setting}/seed-{seed}"  # where a run lies in the study's folder

    def runs(self, output: Path, seeds: Sequence[int]) -> list[Run]:
        """All runs, seed by seed: after the first seed, every setting has a number."""
        return [
            Run(
                setting.name,
                seed,
                setting.at(seed),
                RunFolder(output / self.layout.format(setting=setting.name, seed=seed)),
            )
            for seed in seeds
            for setting in self.settings
        ]

    def only(self, names: Sequence[str]) -> Study:
        """The study with only the named settings and the baseline, which every difference needs."""
        known = [setting.name for setting in self.settings]
        for name in names:
            if name not in known:
                hint = nearest(name, known) or f"; known: {', '.join(known)}"
                raise UserError(f"--only: no setting {name!r} in the study{hint}")
        wanted = {*names, self.baseline}
        return replace(self, settings=tuple(setting for setting in self.settings if setting.name in wanted))


Studies = dict[str, Study | str]  # name → the study, or why it could not be read


def read_study(files: Sequence[str], overrides: Sequence[str] = ()) -> Study:
    """The study in a file, or the one that several recipes make: each a setting by its stem, the first the baseline.

    `overrides` change every setting.
    """
    if not files:
        raise UserError("name a study file, or two recipes to compare")
    if len(files) == 1:
        return _from_file(find_study(files[0]), overrides)
    settings = []
    for name in files:
        path = find_recipe(name)
        settings.append(Setting(_checked(path.stem, str(path)), load_recipe(path, overrides)))
    names = [setting.name for setting in settings]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"two recipes are called {twice}: a setting is named by its file, rename one")
    return Study(tuple(settings), names[0])


def are_studies(files: Sequence[str]) -> bool:
    """Whether the files are several studies; several recipes, or one file of either kind, are not.

    Raises:
        UserError: some are studies and some are not, or two studies have the same name.
    """
    if len(files) < 2:
        return False
    studies = [name for name in files if _is_study(name)]
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
    selected: Studies = {}
    for stem, study in studies.items():
        if isinstance(study, str):
            selected[stem] = study
        elif names := [name for name in only if any(setting.name == name for setting in study.settings)]:
            selected[stem] = study.only(names)
    return selected


def _is_study(name: str) -> bool:
    """Whether that is a study, rather than a recipe or nothing; UserError when it is not YAML."""
    try:
        path = find_study(name)
    except UserError:
        return False
    content: Any = parse_yaml(_text(path), name)
    return isinstance(content, Mapping) and "settings" in content


def _from_file(path: Path, overrides: Sequence[str]) -> Study:
    content: Any = parse_yaml(_text(path), str(path))
    if not isinstance(content, Mapping) or "settings" not in content:
        raise UserError(f"{path}: not a study: it has no 'settings' (to compare recipes, name at least two)")
    for key in content:
        if key not in _KEYS:
            raise UserError(
                f"{path}: unknown key {key!r}{nearest(str(key), list(_KEYS)) or '; known: ' + ', '.join(_KEYS)}"
            )
    described = content["settings"]
    if not isinstance(described, Mapping) or not described:
        raise UserError(f"{path}: 'settings' must map names to what they change in the base")
    base = _base(content.get("base"), path)
    settings = []
    for name, changes in described.items():
        if changes is not None and not isinstance(changes, Mapping):
            raise UserError(f"{path}: setting {name!r} must be a mapping of what it changes, got {changes!r}")
        rest = dict(changes or {})
        about = rest.pop("about", "")
        where = f"{path}, setting {name!r}"
        settings.append(Setting(_checked(name, str(path)), load_recipe(base, overrides, rest, where), str(about)))
    names = [setting.name for setting in settings]
    baseline = content.get("baseline", names[0])
    if baseline not in names:
        raise UserError(f"{path}: the baseline {baseline!r} is not one of the settings{nearest(str(baseline), names)}")
    return Study(tuple(settings), baseline, str(content.get("about", "")))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file") from None


def find_study(name: str) -> Path:
    """A study's file: the path as given, else a study that ships with the package (`learning/rate`)."""
    return find_yaml(name, "studies")


def _base(name: Any, path: Path) -> Path:
    if not isinstance(name, str):
        raise UserError(f"{path}: 'base' must name the recipe that the settings change")
    beside = path.parent / name
    return beside if beside.is_file() else find_recipe(name)


def _checked(name: Any, where: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(f"{where}: {name!r} cannot name a setting: use letters, digits, spaces and - _ . , = +")
    return name
