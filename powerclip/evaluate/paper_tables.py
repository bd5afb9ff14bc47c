"""The paper's tables from result files: its published rows beside measured ones, averages, ranks and wins.

Averages are computed from the columns, for published rows too; docs/paper-notes.md lists where the printed ones differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from powerclip.errors import UserError
from powerclip.evaluate.composition import GROUPS, KINDS
from powerclip.evaluate.runner import read_records
from powerclip.evaluate.suites import BENCHMARKS

_RETRIEVAL = ("mscoco_captions", "flickr8k", "flickr30k")
_LABELS = {benchmark.key: benchmark.label for benchmark in BENCHMARKS}
_SIDES = ("text", "image")


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str
    label: str
    over: tuple[str, ...] = ()  # the columns that it is the mean of
    group: str = ""  # what neighbouring columns share, where a format can write it above them
    part: str = ""  # the label below it


@dataclass(frozen=True)
class Row:
    """A method and what it reached, in percent; what was not measured is missing."""

    name: str
    values: Mapping[str, float]
    published: bool = False


@dataclass(frozen=True)
class Cell:
    """A value as it is shown."""

    text: str
    mark: str = ""  # "best", "second" or nothing


@dataclass(frozen=True)
class Table:
    """One table of the paper."""

    key: str
    title: str
    columns: tuple[Column, ...]  # those measured, then those computed
    rows: tuple[Row, ...]
    counted: bool = True  # whether its wins count: not those that another table has already

    def value(self, row: Row, column: Column) -> float | None:
        """A value, or the mean of others if all of them are there."""
        if not column.over:
            return row.values.get(column.key)
        parts = [row.values.get(key) for key in column.over]
        known = [part for part in parts if part is not None]
        return sum(known) / len(known) if len(known) == len(parts) else None

    def cells(self) -> list[tuple[Row, list[Cell]]]:
        """The table's body: one decimal, ranked by what is shown."""
        grid = [[self.value(row, column) for column in self.columns] for row in self.rows]
        marks = [rank([line[place] for line in grid]) for place in range(len(self.columns))]
        return [
            (
                row,
                [Cell(show(value), marks[place][number]) for place, value in enumerate(grid[number])],
            )
            for number, row in enumerate(self.rows)
        ]

    def wins(self) -> dict[str, int]:
        """Method → measured columns, averages not among them, in which none is better. A tie counts for both."""
        body = self.cells()
        measured = [place for place, column in enumerate(self.columns) if not column.over]
        return {row.name: sum(cells[place].mark == "best" for place in measured) for row, cells in body}


def show(value: float | None) -> str:
    """One decimal, halves upwards as the paper's tables have them; a dash for nothing."""
    return "–" if value is None else f"{int(10 * value + 0.5 + 1e-9) / 10:.1f}"


def rank(values: Sequence[float | None]) -> list[str]:
    """The mark of each value, by what is shown of it; equal ones share it.

    A single value is no contest, and of two the second is the last.
    """
    known = [float(show(value)) for value in values if value is not None]
    places = sorted(set(known), reverse=True)
    names = dict(zip(places, ("best", "second")[: len(known) - 1], strict=False)) if known else {}
    return ["" if value is None else names.get(float(show(value)), "") for value in values]


def published() -> dict[str, Any]:
    """The paper's rows as they were printed, by table."""
    text = files("powerclip.evaluate").joinpath("published.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(text)["tables"]
    return tables


def layouts() -> dict[str, tuple[str, tuple[Column, ...]]]:
    """Key → title and columns of each table."""
    plain = {suite: [b.key for b in BENCHMARKS if b.suite == suite] for suite in ("classification", "robustness")}
    robust = plain["robustness"]
    recalls = [(f"{name}:{side}@{k}", name, side, k) for side in _SIDES for name in _RETRIEVAL for k in (1, 5, 10)]
    return {
        "classification": (
            "Table 1. Zero-shot classification, top-1 accuracy (VOC07: mean average precision in measured rows)",
            (*_plain(plain["classification"]), Column("avg", "Avg", tuple(plain["classification"]))),
        ),
        "retrieval": (
            "Table 2. Zero-shot retrieval, recall",
            (
                *(
                    Column(key, f"{_LABELS[name]} {side} R@{k}", group=f"{_LABELS[name]} {side}", part=f"R@{k}")
                    for key, name, side, k in recalls
                ),
                *(
                    Column(
                        f"avg@{k}", f"Avg R@{k}", tuple(key for key, *_, own in recalls if own == k), "Avg", f"R@{k}"
                    )
                    for k in (1, 5, 10)
                ),
            ),
        ),
        "robustness": (
            "Table 3. Robustness, top-1 accuracy",
            (
                *_plain(robust),
                Column("in", "IN", tuple(robust[:1])),
                Column("ood", "OOD", tuple(robust[1:])),
                Column("all", "All", tuple(robust)),
            ),
        ),
        "sugarcrepe": (
            "Table 4. Compositionality, SugarCrepe",
            (Column("obj", "Obj"), Column("att", "Att"), Column("rel", "Rel")),
        ),
        "winoground": (
            "Table 5. Compositionality, Winoground",
            (Column("text", "Text"), Column("image", "Image"), Column("group", "Group")),
        ),
        "probe": (
            "Table 9. Linear probe, top-1 accuracy",
            tuple(Column(name, _LABELS[f"{name}:probe"]) for name in ("cifar10", "cifar100", "imagenet1k")),
        ),
        "sugarcrepe_kinds": (
            "Table 12. Compositionality, SugarCrepe by kind",
            tuple(_kind(kind) for kind in KINDS),
        ),
    }


def build_tables(records: Sequence[Mapping[str, Any]], with_published: bool = True) -> list[Table]:
    """The tables that the results have something for; all of the paper's where there are no results.

    Raises:
        UserError: they have nothing for any.
    """
    measured = measured_rows(records)
    tables = []
    for key, (title, columns) in layouts().items():
        rows: list[Row] = []
        if with_published:
            printed = published()[key]
            # The printed averages stand behind the columns, and are not taken.
            rows = [
                Row(name, dict(zip(printed["columns"], values, strict=False)), published=True)
                for name, values in printed["rows"].items()
            ]
        ours = [Row(name, tables_of[key]) for name, tables_of in measured.items() if tables_of.get(key)]
        if ours or not records:
            # Table 4 has the wins of Table 12 already.
            tables.append(Table(key, title, columns, (*rows, *ours), counted=key != "sugarcrepe_kinds"))
    own = [Row(name, tables_of["own"]) for name, tables_of in measured.items() if tables_of.get("own")]
    if own:
        known = {column.key: column for record in records for column in _own(record)}
        columns = tuple(known[key] for key in dict.fromkeys(key for row in own for key in row.values))
        tables.append(Table("own", "Other data", columns, tuple(own), False))
    if not tables:
        raise UserError("none of the results has a metric that the tables show")
    return tables


def measured_rows(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Model → table → column → percent. What is in none of the paper's tables is in table `own`.

    Raises:
        UserError: two results of a model on a dataset differ: one of them would not be seen.
    """
    plain = {benchmark.key: benchmark.suite for benchmark in BENCHMARKS}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for record, name in zip(records, _names(records), strict=True):
        tables = found.setdefault(name, {})
        dataset, task, metrics = _dataset(str(record["dataset"])), record["task"], record["metrics"]
        head, _, part = dataset.rpartition("/")
        if task == "linear_probe" and f"{dataset}:probe" in plain:
            values = ("probe", {dataset: metrics.get("lp_acc1")})
        elif task == "zeroshot_retrieval" and dataset in _RETRIEVAL:
            values = ("retrieval", {f"{dataset}:{side}@{k}": value for (side, k), value in _recalls(metrics).items()})
        elif dataset == "winoground":
            own = {"text": "text_acc", "image": "image_acc", "group": "acc"}
            values = ("winoground", {key: metrics.get(metric) for key, metric in own.items()})
        elif head == "sugar_crepe" and part in KINDS and _complete(record):
            values = ("sugarcrepe_kinds", {part: metrics.get("acc")})
        elif task == "zeroshot_classification" and plain.get(dataset) in ("classification", "robustness"):
            values = (plain[dataset], {dataset: metrics.get("acc1", metrics.get("mean_average_precision"))})
        else:
            values = ("own", {column.key: value for column, value in _own(record).items()})
        key, shares = values
        known = {label: 100 * value for label, value in shares.items() if _is_number(value)}
        if known:
            row = tables.setdefault(key, {})
            differ = next((label for label, value in known.items() if show(row.get(label, value)) != show(value)), None)
            if differ:
                raise UserError(
                    f"two results of {name} on {record['dataset']} differ, {show(row[differ])} and "
                    f"{show(known[differ])}: leave one of them out"
                )
            row.update(known)
    for tables in found.values():
        kinds = tables.get("sugarcrepe_kinds", {})
        # A group is the mean over its kinds: with one of them missing it would be another number.
        means = {group: _mean([kinds.get(kind) for kind in own]) for group, own in GROUPS.items()}
        groups = {group: mean for group, mean in means.items() if mean is not None}
        if groups:
            tables["sugarcrepe"] = groups
    return found


def _is_number(value: object) -> bool:
    """Whether it can be shown; what another tool left out, or computed as NaN, was not measured."""
    return isinstance(value, int | float) and math.isfinite(value)


def _names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each result's model is called; models of the same name are told apart by a hash of their weights."""
    names = [" ".join(filter(None, [str(one["model"]), str(one.get("pretrained") or "")])) for one in records]
    weights = [str(one.get("powerclip", {}).get("weights", "")) for one in records]
    different: dict[str, set[str]] = {}
    for name, own in zip(names, weights, strict=True):
        different.setdefault(name, set()).add(own)
    return [
        f"{name} ({own[:6]})" if own and len(different[name]) > 1 else name
        for name, own in zip(names, weights, strict=True)
    ]


def _recalls(metrics: Mapping[str, float | None]) -> dict[tuple[str, int], float | None]:
    """Side and k → recall, of a retrieval result; of others nothing."""
    names = {(side, k): f"{side}_retrieval_recall@{k}" for side in _SIDES for k in (1, 5, 10)}
    return {key: metrics[name] for key, name in names.items() if name in metrics}


def _own(record: Mapping[str, Any]) -> dict[Column, float | None]:
    """The metrics of a result that tell most, in columns of their own."""
    dataset, metrics = _dataset(str(record["dataset"])), record["metrics"]

    def column(group: str, part: str, between: str = " ") -> Column:
        label = f"{group}{between}{part}"
        return Column(label, label, group=group, part=part)

    if recalls := _recalls(metrics):
        return {column(f"{dataset} {side}", f"R@{k}"): value for (side, k), value in recalls.items()}
    head, _, part = dataset.rpartition("/")
    alone = column(head, part, "/") if head else Column(dataset, dataset)
    shown = {
        "acc1": alone,
        "lp_acc1": column(dataset, "probe"),
        "mean_average_precision": column(dataset, "mAP"),
        "acc": alone,
        "pointing_words": column(dataset, "in caption"),
        "pointing_text": column(dataset, "alone"),
    }
    return {column: metrics[name] for name, column in shown.items() if name in metrics}


def _complete(record: Mapping[str, Any]) -> bool:
    """Whether no comparison was left out for want of its image: a part of a benchmark is not the benchmark."""
    return not record.get("powerclip", {}).get("counts", {}).get("missing")


def _kind(kind: str) -> Column:
    change, _, what = kind.partition("_")
    return Column(kind, f"{change.capitalize()} {what.capitalize()}", (), change.capitalize(), what.capitalize())


def collect(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The results in files and folders.

    Raises:
        UserError: nothing is there, or a file holds no results.
    """
    records = []
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no file or folder {path}")
        listed = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not listed:
            raise UserError(f"{path} holds no result files (*.json)")
        records += [record for file in listed for record in read_records(file)]
    return records


def _plain(keys: Sequence[str]) -> tuple[Column, ...]:
    return tuple(Column(key, _LABELS[key]) for key in keys)


def _dataset(name: str) -> str:
    """clip-benchmark's name without what says where it was read from: `wds/vtab/cifar10` → `cifar10`."""
    for prefix in ("wds/", "wds_", "tfds/", "vtab/", "vtab-"):
        name = name.removeprefix(prefix)
    return name


def _mean(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) / len(known) if known and len(known) == len(parts) else None
