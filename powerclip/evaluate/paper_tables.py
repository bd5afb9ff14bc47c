"""The paper's tables from result files: its published rows beside measured ones, averages, ranks and wins.

Averages are computed from the columns, for published rows too; docs/paper-notes.md lists where the printed ones differ.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from powerclip.errors import UserError
from powerclip.evaluate.metrics import GROUPS, KINDS
from powerclip.evaluate.paper_studies import unified
from powerclip.evaluate.runner import read_records
from powerclip.evaluate.suites import BENCHMARKS
from powerclip.report.page import html_page
from powerclip.report.table import Cell, Column, Row, Table, fixed, rank

FORMATS = ("md", "tex", "html")

_RETRIEVAL = ("mscoco_captions", "flickr8k", "flickr30k")
_LABELS = {benchmark.key: benchmark.label for benchmark in BENCHMARKS}
_SIDES = ("text", "image")
_DETECTED = {"base": "ap50_base", "novel": "ap50_novel", "all": "ap50"}  # column of Table 15 → metric
# What other tables count already, and what is none of the paper's 28 benchmarks.
_UNCOUNTED = ("sugarcrepe_kinds", "ov_coco")
LEAST_AXES = 3  # of Figure 2
_GROUPS = {
    "classification": "Classification",
    "retrieval": "Retrieval",
    "robustness": "Robustness",
    "sugarcrepe": "SugarCrepe",
    "winoground": "Winoground",
}


@dataclass(frozen=True)
class Metric:
    """A column of a paper's table."""

    key: str
    label: str
    over: tuple[str, ...] = ()  # the columns that it is the mean of
    group: str = ""  # what neighbouring columns share
    short: str = ""  # the label below the group's name


@dataclass(frozen=True)
class Method:
    """A row: a method and what it reached, in percent; what was not measured is missing."""

    name: str
    values: Mapping[str, float]
    published: bool = False

    def value(self, metric: Metric) -> float | None:
        """The value of a column, or the mean of other columns if all of them were measured."""
        if not metric.over:
            return self.values.get(metric.key)
        return _mean([self.values.get(key) for key in metric.over])


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper."""

    key: str
    title: str
    metrics: tuple[Metric, ...]  # those measured, then those computed
    methods: tuple[Method, ...]
    counted: bool = True  # whether its wins count: not those that another table has already

    def wins(self) -> list[int]:
        """For each method the measured columns, averages not among them, in which none is better.

        A tie counts for both; a single value is no contest.
        """
        wins = [0] * len(self.methods)
        for metric in self.metrics:
            values = [method.value(metric) for method in self.methods]
            shown = [None if value is None else float(fixed(value)) for value in values]
            measured = [value for value in shown if value is not None]
            if metric.over or len(measured) < 2:
                continue
            wins = [count + (value == max(measured)) for count, value in zip(wins, shown, strict=True)]
        return wins

    def table(self) -> Table:
        """One decimal, ranked by what is shown, and how often each method leads."""
        grid = [[method.value(metric) for metric in self.metrics] for method in self.methods]
        marks = [rank(column) for column in zip(*grid, strict=True)]
        wins = self.wins()
        rows = []
        for number, method in enumerate(self.methods):
            cells = [Cell(fixed(value), marks[k][number]) for k, value in enumerate(grid[number])]
            cells.append(Cell(str(wins[number])))
            css = "" if method.published else "measured"
            rows.append(Row(method.name, cells, published=method.published, css=css))
        columns = [Column(metric.label, metric.group, metric.short) for metric in self.metrics]
        return Table([*columns, Column("Wins")], rows, title=self.title, corner="Method")


def render(tables: Sequence[PaperTable], form: str, ablations: Sequence[Table] = ()) -> str:
    """The tables as a document in one of `FORMATS`, by their numbers, with how often each method leads.

    Raises:
        UserError: there is no such format.
    """
    if form not in FORMATS:
        raise UserError(f"there is no format {form!r} for tables; known: {', '.join(FORMATS)}")
    plain = sorted([*(table.table() for table in tables), *ablations], key=_number)
    wins, note = wins_line(tables) if tables else "", _note(tables, ablations)
    if form == "md":
        return "\n\n".join(filter(None, [*(table.markdown() for table in plain), wins, note])) + "\n"
    if form == "tex":
        # LaTeX numbers its tables itself.
        captions = [re.sub(r"^(Table \d+)\. (.*)", r"\2. The paper's \1", table.title) + "." for table in plain]
        parts = [table.latex(caption) for table, caption in zip(plain, captions, strict=True)]
        return "\n\n".join(["% needs \\usepackage{booktabs,graphicx}", *parts, f"% {note}"]) + "\n"
    lines = [f"<p>{escape(line)}</p>" for line in (wins, note) if line]
    body = "\n".join([*(table.html() for table in plain), *lines])
    return html_page("Results beside the paper's", body, wide=True)


def wins_line(tables: Sequence[PaperTable]) -> str:
    """`Wins in 47 columns: PowerCLIP-S† 35, …`, the most first."""
    total: dict[str, int] = {}
    counted = [table for table in tables if table.counted] or list(tables)
    columns = sum(1 for table in counted for metric in table.metrics if not metric.over)
    for table in counted:
        for method, count in zip(table.methods, table.wins(), strict=True):
            name = method.name + ("†" if method.published else "")
            total[name] = total.get(name, 0) + count
    listed = sorted(total.items(), key=lambda item: -item[1])
    return f"Wins in {columns} columns: " + ", ".join(f"{name} {count}" for name, count in listed) + "."


def _number(table: Table) -> int:
    """The paper's number of a table; the others come last."""
    number = re.match(r"Table (\d+)\.", table.title)
    return int(number[1]) if number else 1000


def _note(tables: Sequence[PaperTable], ablations: Sequence[Table] = ()) -> str:
    """What the marks in these tables mean."""
    note = "Percent. Best bold, second of three or more underlined, by the values as shown."
    published_rows = any(method.published for table in tables for method in table.methods)
    published_rows |= any("†" in column.label for table in ablations for column in table.columns)
    return note + (" † as published in the paper, not measured here." if published_rows else "")


def published() -> dict[str, Any]:
    """The paper's rows as they were printed, by table."""
    text = files("powerclip.evaluate").joinpath("published.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(text)["tables"]
    return tables


def layouts() -> dict[str, tuple[str, tuple[Metric, ...]]]:
    """Key → title and columns of each table."""
    plain = {suite: [b.key for b in BENCHMARKS if b.suite == suite] for suite in ("classification", "robustness")}
    robust = plain["robustness"]
    recalls = [(f"{name}:{side}@{k}", name, side, k) for side in _SIDES for name in _RETRIEVAL for k in (1, 5, 10)]
    return {
        "classification": (
            "Table 1. Zero-shot classification, top-1 accuracy",
            (*_plain(plain["classification"]), Metric("avg", "Avg", tuple(plain["classification"]))),
        ),
        "retrieval": (
            "Table 2. Zero-shot retrieval, recall",
            (
                *(
                    Metric(key, f"{_LABELS[name]} {side} R@{k}", group=f"{_LABELS[name]} {side}", short=f"R@{k}")
                    for key, name, side, k in recalls
                ),
                *(
                    Metric(f"avg@{k}", f"Avg R@{k}", tuple(key for key, *_, at in recalls if at == k), "Avg", f"R@{k}")
                    for k in (1, 5, 10)
                ),
            ),
        ),
        "robustness": (
            "Table 3. Robustness, top-1 accuracy",
            (
                *_plain(robust),
                Metric("in", "IN", tuple(robust[:1])),
                Metric("ood", "OOD", tuple(robust[1:])),
                Metric("all", "All", tuple(robust)),
            ),
        ),
        "sugarcrepe": (
            "Table 4. Compositionality, SugarCrepe",
            (Metric("obj", "Obj"), Metric("att", "Att"), Metric("rel", "Rel")),
        ),
        "winoground": (
            "Table 5. Compositionality, Winoground",
            (Metric("text", "Text"), Metric("image", "Image"), Metric("group", "Group")),
        ),
        "probe": (
            "Table 9. Linear probe, top-1 accuracy",
            tuple(Metric(name, _LABELS[f"{name}:probe"]) for name in ("cifar10", "cifar100", "imagenet1k")),
        ),
        "sugarcrepe_kinds": (
            "Table 12. Compositionality, SugarCrepe by kind",
            tuple(_kind(kind) for kind in KINDS),
        ),
        "ov_coco": (
            "Table 15. Open-vocabulary detection, OV-COCO, AP50",
            tuple(Metric(part, part.capitalize()) for part in _DETECTED),
        ),
    }


def build_tables(records: Sequence[Mapping[str, Any]], with_published: bool = True) -> list[PaperTable]:
    """The tables that the results have something for; all of the paper's where there are no results.

    Raises:
        UserError: they have nothing for any.
    """
    measured = measured_rows(records)
    tables = []
    for key, (title, columns) in layouts().items():
        rows: list[Method] = []
        if with_published:
            printed = published()[key]
            # The printed averages stand behind the columns, and are not taken.
            rows = [
                Method(name, dict(zip(printed["columns"], values, strict=False)), published=True)
                for name, values in printed["rows"].items()
            ]
        ours = [Method(name, tables_of[key]) for name, tables_of in measured.items() if tables_of.get(key)]
        if ours or not records:
            tables.append(PaperTable(key, title, columns, (*rows, *ours), counted=key not in _UNCOUNTED))
    everything = _unified(measured, with_published)
    filled = [metric.group for metric in everything.metrics if _is_filled(everything, metric.key)]
    if not records or (len(filled) >= LEAST_AXES and len(set(filled)) > 1):
        tables.append(everything)
    others = [Method(name, tables_of["own"]) for name, tables_of in measured.items() if tables_of.get("own")]
    if others:
        by_key = {column.key: column for record in records for column in _other_columns(record)}
        columns = tuple(by_key[key] for key in dict.fromkeys(key for row in others for key in row.values))
        tables.append(PaperTable("own", "Other data", columns, tuple(others), False))
    if not tables:
        raise UserError("none of the results has a metric that the tables show")
    return tables


def _is_filled(table: PaperTable, key: str) -> bool:
    """Whether a column has a value that was measured."""
    return any(key in method.values for method in table.methods if not method.published)


def _unified(measured: Mapping[str, Mapping[str, Mapping[str, float]]], with_published: bool) -> PaperTable:
    """Table 11, the numbers of Figure 2: the other tables' columns side by side."""
    columns, printed = unified()
    known = {table: {metric.key: metric for metric in metrics} for table, (_, metrics) in layouts().items()}
    metrics = tuple(replace(known[table][key], group=_GROUPS[table], short="") for table, key in columns)
    keys = [metric.key for metric in metrics]
    rows = [Method(name, dict(zip(keys, values, strict=True)), published=True) for name, values in printed.items()]
    ours = [
        Method(name, {key: of[table][key] for table, key in columns if key in of.get(table, {})})
        for name, of in measured.items()
    ]
    methods = (*(rows if with_published else ()), *(method for method in ours if method.values))
    return PaperTable("unified", "Table 11. All benchmarks", metrics, methods, counted=False)


def draw_radar(records: Sequence[Mapping[str, Any]], with_published: bool, path: Path) -> None:
    """Figure 2: the methods of Table 11 on all axes, each scaled to the best of them.

    Raises:
        UserError: fewer than three benchmarks were measured, or the file's format cannot be written.
    """
    from powerclip.report.radar import FORMATS as PICTURES
    from powerclip.report.radar import save_radar

    form = path.suffix.lstrip(".").lower()
    if form not in PICTURES:
        raise UserError(f"--radar: there is no format {form!r}; known: {', '.join(PICTURES)}")
    table = _unified(measured_rows(records), with_published)
    ours = [method for method in table.methods if not method.published]
    axes = [
        metric
        for metric in table.metrics
        if not ours or any(metric.key in method.values for method in ours)  # where something stands beside the paper
    ]
    if len(axes) < LEAST_AXES:
        raise UserError(
            f"--radar: {len(axes)} of the paper's benchmarks were measured, and a figure needs {LEAST_AXES}"
        )
    series = {
        method.name + ("†" if method.published else ""): [method.value(metric) for metric in axes]
        for method in table.methods
    }
    named = ("SugarCrepe", "Winoground")  # whose columns do not say what they are
    labels = [f"{axis.group} {axis.label}" if axis.group in named else axis.label for axis in axes]
    save_radar([label.removesuffix(" R@1") for label in labels], series, path)


def measured_rows(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Model → table → column → percent. What is in none of the paper's tables is in table `own`.

    Raises:
        UserError: two results of a model on a dataset differ: the table would show only one of them.
    """
    plain = {benchmark.key: benchmark.suite for benchmark in BENCHMARKS}
    by_model: dict[str, dict[str, dict[str, float]]] = {}
    for record, name in zip(records, _names(records), strict=True):
        tables = by_model.setdefault(name, {})
        dataset, task, metrics = _dataset(str(record["dataset"])), record["task"], record["metrics"]
        head, _, part = dataset.rpartition("/")
        if dataset == "sugar_crepe" and _complete(record):
            continue  # the whole; the tables have its kinds
        if task == "linear_probe" and f"{dataset}:probe" in plain:
            values = ("probe", {dataset: metrics.get("lp_acc1")})
        elif task == "zeroshot_retrieval" and dataset in _RETRIEVAL:
            values = ("retrieval", {f"{dataset}:{side}@{k}": value for (side, k), value in _recalls(metrics).items()})
        elif task == "detection" and dataset == "ov_coco":
            values = ("ov_coco", {key: metrics.get(metric) for key, metric in _DETECTED.items()})
        elif dataset == "winoground":
            columns = {"text": "text_acc", "image": "image_acc", "group": "acc"}
            values = ("winoground", {key: metrics.get(metric) for key, metric in columns.items()})
        elif head == "sugar_crepe" and part in KINDS and _complete(record):
            values = ("sugarcrepe_kinds", {part: metrics.get("acc")})
        elif task == "zeroshot_classification" and plain.get(dataset) in ("classification", "robustness"):
            values = (plain[dataset], {dataset: metrics.get("acc1")})
        else:
            values = ("own", {column.key: value for column, value in _other_columns(record).items()})
        key, shares = values
        percents = {label: 100 * value for label, value in shares.items() if _is_number(value)}
        if percents:
            row = tables.setdefault(key, {})
            changed = [label for label, value in percents.items() if fixed(row.get(label, value)) != fixed(value)]
            if changed:
                raise UserError(
                    f"two results of {name} on {record['dataset']} differ, {fixed(row[changed[0]])} and "
                    f"{fixed(percents[changed[0]])}: leave one of them out"
                )
            row.update(percents)
    for tables in by_model.values():
        kinds = tables.get("sugarcrepe_kinds", {})
        # A group is the mean over its kinds: with one of them missing it would be another number.
        means = {group: _mean([kinds.get(kind) for kind in members]) for group, members in GROUPS.items()}
        groups = {group: mean for group, mean in means.items() if mean is not None}
        if groups:
            tables["sugarcrepe"] = groups
    return by_model


def _is_number(value: object) -> bool:
    """Whether a value was measured: another tool may have left it out, or computed NaN."""
    return isinstance(value, int | float) and math.isfinite(value)


def _names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each result's model is called, with the score that it was measured by unless that is the global one.

    Models of the same name are told apart by a hash of their weights.
    """
    names = [
        ", ".join(
            filter(None, [" ".join(filter(None, [str(one["model"]), str(one.get("pretrained") or "")])), _score(one)])
        )
        for one in records
    ]
    weights = [str(one.get("powerclip", {}).get("weights", "")) for one in records]
    different: dict[str, set[str]] = {}
    for name, digest in zip(names, weights, strict=True):
        different.setdefault(name, set()).add(digest)
    return [
        f"{name} ({digest[:6]})" if digest and len(different[name]) > 1 else name
        for name, digest in zip(names, weights, strict=True)
    ]


def _score(record: Mapping[str, Any]) -> str:
    about = record.get("powerclip", {}).get("score", {})
    return str(about.get("name", "")) if isinstance(about, dict) else ""


def _recalls(metrics: Mapping[str, float | None]) -> dict[tuple[str, int], float | None]:
    """Side and k → recall, of a retrieval result; of others nothing."""
    names = {(side, k): f"{side}_retrieval_recall@{k}" for side in _SIDES for k in (1, 5, 10)}
    return {key: metrics[name] for key, name in names.items() if name in metrics}


def _other_columns(record: Mapping[str, Any]) -> dict[Metric, float | None]:
    """The main metrics of a result that none of the paper's tables has, as columns."""
    dataset, metrics = _dataset(str(record["dataset"])), record["metrics"]

    def column(group: str, part: str, between: str = " ") -> Metric:
        label = f"{group}{between}{part}"
        return Metric(label, label, group=group, short=part)

    if recalls := _recalls(metrics):
        return {column(f"{dataset} {side}", f"R@{k}"): value for (side, k), value in recalls.items()}
    head, _, part = dataset.rpartition("/")
    single = column(head, part, "/") if head else Metric(dataset, dataset)
    shown = {
        "acc1": single,
        "lp_acc1": column(dataset, "probe"),
        "mean_average_precision": column(dataset, "mAP"),
        "acc": single,
        "pointing_words": column(dataset, "in caption"),
        "pointing_text": column(dataset, "alone"),
        "swap_words": column(dataset, "swap in caption"),
        "swap_text": column(dataset, "swap alone"),
        **{metric: column(dataset, f"AP50 {part}") for part, metric in _DETECTED.items()},
        "region_base": column(dataset, "base"),
        "region_novel": column(dataset, "novel"),
    }
    return {column: metrics[name] for name, column in shown.items() if name in metrics}


def _complete(record: Mapping[str, Any]) -> bool:
    """Whether the images of all comparisons were found: a score on some of them is not comparable."""
    return not record.get("powerclip", {}).get("counts", {}).get("missing")


def _kind(kind: str) -> Metric:
    change, _, what = kind.partition("_")
    return Metric(kind, f"{change.capitalize()} {what.capitalize()}", (), change.capitalize(), what.capitalize())


def collect(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The results in files and folders.

    Raises:
        UserError: a path does not exist, or a file holds no results.
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


def _plain(keys: Sequence[str]) -> tuple[Metric, ...]:
    return tuple(Metric(key, _LABELS[key]) for key in keys)


def _dataset(name: str) -> str:
    """clip-benchmark's name without what says where it was read from: `wds/vtab/cifar10` → `cifar10`."""
    for prefix in ("wds/", "wds_", "tfds/", "vtab/", "vtab-"):
        name = name.removeprefix(prefix)
    return name


def _mean(parts: Sequence[float | None]) -> float | None:
    measured = [part for part in parts if part is not None]
    return sum(measured) / len(measured) if measured and len(measured) == len(parts) else None
