"""The files that a recipe reads, checked before anything is built; errors name the recipe's setting."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from powerclip.data.columns import Columns
from powerclip.data.paths import expand_path, expand_pattern, user_cache
from powerclip.data.remote import expand_urls, is_url
from powerclip.data.shards import expand_shards, iter_names
from powerclip.data.table import TABLE_SUFFIXES, is_table
from powerclip.data.table_parts import TableSet, open_tables
from powerclip.data.tar_index import find_info, make_index
from powerclip.errors import UserError
from powerclip.train.recipe import Recipe
from powerclip.train.sections import FLAT, SIDECARS, DataSection

# Up to so many tars without an index are read to count their samples; with more, the count stays unknown.
FEW = 64


@dataclass(frozen=True)
class Input:
    """What one setting names."""

    setting: str
    summary: str
    problem: str | None = None  # why a run could not begin
    paths: tuple[Path, ...] = ()  # the tars, where it names some


def inputs(recipe: Recipe) -> Iterator[Input]:
    """Everything that a run of `recipe` would read, whether it exists or not."""
    data, evaluation = recipe.data, recipe.evaluation
    if data.source == "corpus":
        yield from _find("data.shards", data.shards, _corpus)
        if data.trees not in (FLAT, SIDECARS):
            yield from _find("data.trees", data.trees, _file)
        if recipe.reads_masks or (recipe.reads_trees and data.trees is None):
            yield from _find("data.sidecars", data.sidecars, _folder)
    elif data.source == "shards" and data.shards and names_urls(data.shards):
        yield from _find("data.shards", data.shards, _urls)
        if data.sidecars is not None and not is_url(data.sidecars):
            yield from _find("data.sidecars", data.sidecars, _folder)
    elif data.source == "shards":
        yield from _find("data.shards", data.shards, _shards)
        yield from _find("data.sidecars", data.sidecars, _folder)
    elif data.source == "table":
        yield from _find("data.table", data.table, _table)
        yield from _find("data.sidecars", data.sidecars, _folder)
    yield from _find("evaluation.retrieval", evaluation.retrieval, _pattern)
    yield from _find("evaluation.classification", evaluation.classification, _file_or_folder)
    yield from _find("evaluation.composition", evaluation.composition, _folder)
    yield from _packages(recipe)


def _packages(recipe: Recipe) -> Iterator[Input]:
    """Optional packages that a run of `recipe` imports."""
    needed = [("train.wandb", recipe.train.wandb, "wandb", "wandb")]  # setting, value, package, extra
    for setting, value, package, extra in needed:
        if value:
            missing = f"the package {package} is not installed: pip install 'powerclip[{extra}]'"
            yield Input(setting, f"{value}", problem=None if find_spec(package) else missing)


def check_inputs(recipe: Recipe) -> None:
    """UserError, naming the setting, for the first thing that a run would miss: before towers are built for it."""
    for item in inputs(recipe):
        if item.problem:
            raise UserError(f"{item.setting}: {item.problem}")


def samples_of(recipe: Recipe, files: list[Input]) -> int | None:
    """Pairs in an epoch, as the recipe says or as they were counted; None when neither is known."""
    if recipe.data.samples is not None:
        return recipe.data.samples
    if tables := tables_of(recipe, files):
        return tables.samples
    return next((count_samples(item.paths) for item in files if item.setting == "data.shards" and item.paths), None)


def tables_of(recipe: Recipe, files: list[Input]) -> TableSet | None:
    """The tables of a recipe, dealt into parts; None when it names none, or none that is there."""
    data = recipe.data
    if data.source != "table" or data.table is None or any(f.problem for f in files if f.setting == "data.table"):
        return None
    return open_tables(table_paths(data.table, "data.table"), Columns.named(data.image, data.captions))


def _find(setting: str, value: str | None, find: Callable[[str, str], Input]) -> Iterator[Input]:
    if value is None:
        return
    try:
        yield find(value, setting)
    except UserError as error:
        yield Input(setting, "", problem=str(error).removeprefix(f"{setting}: "))


def _pattern(value: str, setting: str) -> Input:
    return _files(expand_pattern(value, setting), setting)


def _corpus(value: str, setting: str) -> Input:
    paths = expand_shards(value, setting)
    if missing := next((path for path in paths if not path.is_file()), None):
        raise UserError(f"{setting}: no file {missing}")
    return _files(paths, setting)


def _shards(value: str, setting: str) -> Input:
    paths = expand_shards(value, setting)  # a path that is spelled out need not exist
    existing = [path for path in paths if path.is_file()]
    if not existing:
        raise UserError(f"{setting}: none of {value} is there (the first would be {paths[0]})")
    item = _files(existing, setting)
    missing = len(paths) - len(existing)
    return replace(item, summary=f"{item.summary}, {missing:,} more are not there") if missing else item


def _urls(value: str, setting: str) -> Input:
    names = remote_names(value, setting)
    return Input(setting, f"{len(names):,} remote shards, the first {names[0]}")


def names_urls(shards: str) -> bool:
    """Whether `data.shards` names remote shards: a URL, or a list of them."""
    return is_url(next(iter(iter_names(shards, "data.shards")), ""))


def remote_names(value: str, setting: str) -> list[str]:
    """The URLs of the remote shards that a setting names."""
    lines = [os.path.expandvars(line) for line in iter_names(value, setting)]
    local = next((line for line in lines if not is_url(line)), None)
    if local is not None:
        raise UserError(f"{setting}: {local} is no URL; a list names either files or URLs")
    return [url for line in lines for url in expand_urls(line, setting)]


def cache_folder(data: DataSection) -> Path:
    """Where copies of a recipe's remote shards lie."""
    return user_cache("shards") if data.cache is None else expand_path(data.cache, "data.cache")


def _table(value: str, setting: str) -> Input:
    paths = table_paths(value, setting)
    return Input(setting, ", ".join(map(str, paths[:3])) + " …" * (len(paths) > 3))


def table_paths(value: str, setting: str) -> list[Path]:
    """The tables that a setting names; UserError when one is none."""
    paths = expand_pattern(value, setting)
    for path in paths:
        if not is_table(path):
            kinds = ", ".join(TABLE_SUFFIXES)
            raise UserError(f"{setting}: {path} is no table ({kinds}, or a folder with NAME.jpg and NAME.txt)")
    return paths


def _files(paths: list[Path], setting: str) -> Input:
    size = sum(path.stat().st_size for path in paths)
    text = f"{len(paths):,} file{'s' * (len(paths) != 1)}, {size / 2**30:.2f} GiB"
    return Input(setting, text, paths=tuple(paths))


def count_samples(paths: Sequence[Path]) -> int | None:
    """Samples in tars, from their indices; None when many have none yet. Writes nothing."""
    infos = [find_info(path) for path in paths]
    if sum(info is None for info in infos) > FEW:
        return None
    return sum((info[0] if info else make_index(path).info).samples for path, info in zip(paths, infos, strict=True))


def _file(value: str, setting: str) -> Input:
    return Input(setting, str(existing_file(value, setting)))


def existing_file(value: str, setting: str) -> Path:
    """The file of trees that a setting names; UserError when it does not exist."""
    path = expand_path(value, setting)
    if not path.is_file():
        raise UserError(
            f"{setting}: no file {path}; null reads the sidecars or parses the captions, {FLAT} trains with one phrase "
            "a caption"
        )
    return path


def _file_or_folder(value: str, setting: str) -> Input:
    return (_folder if expand_path(value, setting).is_dir() else _file)(value, setting)


def _folder(value: str, setting: str) -> Input:
    path = expand_path(value, setting)
    if not path.is_dir():
        raise UserError(f"{setting}: no folder {path}")
    return Input(setting, str(path))


def sidecar_folder(data: DataSection) -> Path | None:
    """Where a recipe's sidecars lie on this machine; None: beside the shards, or the copies of remote ones."""
    if data.sidecars is None or is_url(data.sidecars):
        return None
    return expand_path(data.sidecars, "data.sidecars")
