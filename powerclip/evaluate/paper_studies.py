"""The paper's ablations, its costs and Figure 2 as tables, beside what studies and benchmarks measured here.

Tables 6, 7, 8, 10, 13 and 14 have one number for each setting of a method. The studies that repeat them name their
settings alike, so that a `results.json` of `powerclip compare` fills a column for each of its main scores: these are of
other data and smaller towers, and stand beside the published numbers to be compared by their differences. Table 13 is
also filled by `benchmarks/methods.py`. Table 11 has Figure 2's numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any

from powerclip.errors import UserError
from powerclip.report.table import NOTHING, Cell, Column, Mark, Row, Table, fixed, rank

COST = "13"
# Columns of a study, by the names that scores have or had in its file.
SCORES = {
    "recall": ("retrieval/mean_recall", "retrieval/mean"),
    "R@1": ("retrieval/mean_recall@1", "retrieval/r1"),
    "composition": ("composition/acc", "composition/mean"),
    "scenes: recall": ("scenes/retrieval/mean_recall", "scenes/retrieval"),
    "zero-shot": ("scenes/zero_shot/acc1", "scenes/zero_shot"),
    "pointing": ("scenes/pointing/pointing_words", "scenes/pointing"),
}
LEAST = 2  # settings that a study shares with a table; one, such as its baseline, is no repetition


@dataclass(frozen=True)
class Measured:
    """What a study or a benchmark has measured: setting → what → the values of its seeds."""

    name: str  # of its folder or file
    settings: Mapping[str, Mapping[str, Sequence[float]]]


def read_measured(path: Path) -> Measured | None:
    """The results of a study (its folder or `results.json`), or of `benchmarks/methods.py`; None for another file."""
    file = path / "results.json" if path.is_dir() else path
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    name = file.parent.name if file.name == "results.json" else file.stem
    if not isinstance(content, dict):
        return None
    try:
        if {"settings", "baseline"} <= content.keys():
            return Measured(name, _of_study(content))
        if {"rows", "origin"} <= content.keys() and "relative" in content["rows"][0]:
            times = {row["method"]: {"× CLIP": [float(row["relative"])]} for row in content["rows"]}
            return Measured(name, times)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise UserError(f"{file}: not the results of a study as this version writes them") from None
    return None


def _of_study(content: Mapping[str, Any]) -> dict[str, dict[str, list[float]]]:
    settings: dict[str, dict[str, list[float]]] = {}
    for name, setting in content["settings"].items():
        summary = setting["summary"]
        runs = [run for run in setting["runs"].values() if "error" not in run]
        found = settings[name] = {}
        for label, keys in SCORES.items():
            shown = next((summary[key] for key in keys if key in summary), None)
            if shown is not None:
                # The file has means and deviations of what is made of several scores, and nothing else of them.
                spread = shown.get("std", shown.get("sd"))
                found[label] = [shown["mean"]] if spread is None else [shown["mean"], spread]
        times = [run["seconds_per_step"] for run in runs if run.get("seconds_per_step")]
        if times:
            found["seconds"] = [mean(times)]
    base = settings.get(content["baseline"], {}).get("seconds")
    for found in settings.values():
        if base and "seconds" in found:
            found["× CLIP"] = [found.pop("seconds")[0] / base[0]]
    return settings


def ablation_tables(measured: Sequence[Measured], with_published: bool = True) -> list[Table]:
    """The paper's tables of settings, those that something was measured for; all of them where nothing is given."""
    tables = []
    for key, printed in _content()["ablations"].items():
        columns: list[_Filled] = []
        for study in measured:
            columns += _filled(key, printed, study)
        if columns or not measured:
            tables.append(_table(key, printed, columns, with_published))
    return tables


@dataclass(frozen=True)
class _Filled:
    """A column of a table that a study has filled."""

    study: str
    label: str
    values: Sequence[Sequence[float] | None]  # a mean and a deviation for each row


def _filled(key: str, printed: Mapping[str, Any], study: Measured) -> list[_Filled]:
    found = []
    for kind, note in (("settings", ""), ("printed", ", printed loss")):
        rows = [
            next((study.settings[name] for name in row.get(kind, ()) if name in study.settings), None)
            for row in printed["rows"]
        ]
        names = {id(row) for row in rows if row is not None}
        if len(names) < LEAST:
            continue
        labels = ["× CLIP"] if key == COST else list(SCORES)
        for label in labels:
            values = [None if row is None else row.get(label) for row in rows]
            if any(values):
                found.append(_Filled(f"{study.name}{note}", label, values))
    return found


def _table(key: str, printed: Mapping[str, Any], columns: Sequence[_Filled], with_published: bool) -> Table:
    names = printed["columns"] if with_published else []
    heads = [Column(f"{name}†", "paper†", f"{name}†") for name in names]
    heads += [Column(f"{filled.study}: {filled.label}", filled.study, filled.label) for filled in columns]
    rows: list[list[Cell]] = [[] for _ in printed["rows"]]
    sections = [row.get("section", "") for row in printed["rows"]]
    lower = key == COST  # less time is better: nothing is ranked

    def marks(values: Sequence[float | None]) -> list[Mark]:
        return [""] * len(values) if lower else rank(values)

    for number in range(len(names)):
        values = [row["values"][number] for row in printed["rows"]]
        for cells, value, mark in zip(rows, values, marks(values), strict=True):
            digits = 0 if value > 1000 else 2 if lower else 1
            cells.append(Cell(fixed(value, digits), mark))
    for filled in columns:
        means = [None if value is None else value[0] for value in filled.values]
        for cells, shown, mark in zip(rows, filled.values, marks(means), strict=True):
            cells.append(Cell(_shown(shown, 2 if lower else 1), mark))
    labelled = zip(printed["rows"], rows, sections, strict=True)
    return Table(
        heads,
        [Row(row["label"], cells, section=section) for row, cells, section in labelled],
        title=f"Table {key}. {printed['title']}",
        corner=printed["corner"],
    )


def _shown(value: Sequence[float] | None, digits: int) -> str:
    if value is None:
        return NOTHING
    return " ± ".join(fixed(part, digits) for part in value)


def unified() -> tuple[list[tuple[str, str]], dict[str, list[float]]]:
    """Table 11's columns, as (table, column) of the other tables, and its rows."""
    content = _content()["unified"]
    columns = [(table, key) for table, keys in content["columns"].items() for key in keys]
    return columns, content["rows"]


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        files("powerclip.evaluate").joinpath("published.json").read_text(encoding="utf-8")
    )
    return content
