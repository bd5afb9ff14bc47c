"""The tables of a study: means over seeds, differences to the baseline with a paired test, the cost of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from powerclip.compare.significance import paired_error, paired_p
from powerclip.compare.study import RunFailure, Study, StudyResults
from powerclip.report.table import NOTHING, Cell, Column, Row, Table, fixed, rank, signed
from powerclip.train.results import Results


@dataclass(frozen=True)
class Measure:
    """One thing that a run has measured, and how the tables show it."""

    key: str
    label: str
    compared: bool = True  # ranked, and compared with the baseline
    over: tuple[str, ...] = ()  # the scores that it is the mean of

    def value(self, results: Results) -> float | None:
        """Its value in a run, in percent; None when that was not measured."""
        shares = [results.scores.get(key, results.last.get(key)) for key in self.over or (self.key,)]
        measured = [share for share in shares if share is not None]
        return 100 * mean(measured) if len(measured) == len(shares) else None


_RECALL_AT_1 = ("retrieval/text_retrieval_recall@1", "retrieval/image_retrieval_recall@1")

MEASURES = (
    Measure("retrieval/mean_recall", "retrieval"),
    Measure("retrieval/mean_recall@1", "R@1", over=_RECALL_AT_1),
    Measure(_RECALL_AT_1[0], "R@1 text", compared=False),
    Measure(_RECALL_AT_1[1], "R@1 image", compared=False),
    Measure("classification/acc1", "zero-shot"),
    Measure("composition/acc", "composition"),
    Measure("scenes/retrieval/mean_recall", "scenes: retrieval"),
    Measure("scenes/zero_shot/acc1", "scenes: zero-shot"),
    Measure("scenes/composition/mean_kind_acc", "scenes: composition"),
    Measure("scenes/pointing/pointing_words", "scenes: pointing"),
    Measure("scenes/grounding/swap_words_balanced", "scenes: swap"),
    Measure("scenes/grounding/set_f1_words_several", "scenes: sets"),
    Measure("violation", "violation", compared=False),
    Measure("empty", "empty", compared=False),
)
COMPARED = tuple(measure for measure in MEASURES if measure.compared)


@dataclass(frozen=True)
class Difference:
    """What a setting gains over the baseline, on the seeds that both have finished."""

    gain: float
    standard_error: float | None
    ratio: float | None
    p: float | None

    def describe(self, digits: int = 1, *, error: bool = False) -> str:
        """`+3.0 (×1.25, p = 0.035)`, with `error` also its standard error: `+3.0 ± 0.6 (…)`."""
        with_error = f" ± {fixed(self.standard_error, digits)}" if error and self.standard_error is not None else ""
        notes = [f"×{self.ratio:.2f}"] if self.ratio is not None else []
        notes += [f"p {_describe_p(self.p)}"] if self.p is not None else []
        return f"{signed(self.gain, digits)}{with_error}" + (f" ({', '.join(notes)})" if notes else "")


def study_table(
    study: Study, results: StudyResults, measures: Sequence[Measure] = MEASURES, *, time: bool = True
) -> Table:
    """A row for each setting: each measure that some run has, its difference to the baseline, the time of a step."""
    measures = [measure for measure in measures if any(values(results, name, measure) for name in results)]
    time = time and any(step_time(results, name) for name in results)
    names = [setting.name for setting in study.settings]
    rows: dict[str, list[Cell]] = {name: [] for name in names}
    columns = []
    for measure in measures:
        columns += [Column(measure.label), Column("Δ")] if measure.compared else [Column(measure.label)]
        for name, cell in _cells(study, results, measure).items():
            rows[name].append(cell)
            if measure.compared:
                change = difference(study, results, name, measure)
                rows[name].append(Cell(change.describe() if change else ""))
    if time:
        columns.append(Column("time"))
        for name in names:
            rows[name].append(Cell(_describe_time(study, results, name)))
    return Table(columns, [Row(name, cells) for name, cells in rows.items()], corner="setting")


def measure_table(
    study: Study, results: StudyResults, measures: Sequence[Measure], *, corner: str, digits: int
) -> Table:
    """A row for each measure: the baseline, then each setting and its difference with its standard error."""
    names = sorted((setting.name for setting in study.settings), key=lambda name: name != study.baseline)
    columns = [Column(names[0])]
    for name in names[1:]:
        columns += [Column(name), Column("Δ")]
    rows = []
    for measure in measures:
        cells = _cells(study, results, measure, digits)
        row = [cells[names[0]]]
        for name in names[1:]:
            change = difference(study, results, name, measure)
            row += [cells[name], Cell(change.describe(digits, error=True) if change else "")]
        rows.append(Row(measure.label, row))
    return Table(columns, rows, corner=corner)


def markdown_page(study: Study, table: Table, *paragraphs: str) -> str:
    """A table as Markdown between what the study is about and what its settings are; then the paragraphs."""
    settings = "\n".join(f"- {setting.name}: {setting.about}" for setting in study.settings if setting.about)
    parts = [study.about, table.markdown(), settings, *paragraphs]
    return "\n\n".join(part for part in parts if part) + "\n"


def describe_seeds(seeds: Sequence[int]) -> str:
    """`3 seeds (0, 1, 2)`."""
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(map(str, seeds))})"


def failures(results: StudyResults) -> list[str]:
    """A line for each run that has no results."""
    return [
        f"- {name}, seed {seed}, failed: {result.reason}"
        for name, runs in results.items()
        for seed, result in runs.items()
        if isinstance(result, RunFailure)
    ]


def summary(study: Study, results: StudyResults, name: str, measures: Sequence[Measure]) -> dict[str, Any]:
    """The numbers behind a row of the table, by the measures' keys and in percent, for `results.json`."""
    numbers: dict[str, Any] = {}
    for measure in measures:
        scored = list(values(results, name, measure).values())
        if scored:
            change = difference(study, results, name, measure) if measure.compared else None
            numbers[measure.key] = {
                "mean": mean(scored),
                "std": stdev(scored) if len(scored) > 1 else None,
                "seeds": len(scored),
                "difference": change and change.gain,
                "standard_error": change and change.standard_error,
                "ratio": change and change.ratio,
                "p": change and change.p,
            }
    return numbers


def values(results: StudyResults, name: str, measure: Measure) -> dict[int, float]:
    """Seed → value, of the runs of a setting that have one."""
    finished = {seed: result for seed, result in results[name].items() if isinstance(result, Results)}
    return {seed: value for seed, result in finished.items() if (value := measure.value(result)) is not None}


def difference(study: Study, results: StudyResults, name: str, measure: Measure) -> Difference | None:
    """A setting against the baseline; None for the baseline itself, and where no seed has both."""
    if name == study.baseline:
        return None
    ours, theirs = values(results, name, measure), values(results, study.baseline, measure)
    seeds = [seed for seed in ours if seed in theirs]
    if not seeds:
        return None
    scores, baseline = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
    return Difference(
        gain=mean(scores) - mean(baseline),
        standard_error=paired_error(scores, baseline),
        ratio=mean(scores) / mean(baseline) if mean(baseline) else None,
        p=paired_p(scores, baseline),
    )


def step_time(results: StudyResults, name: str) -> float | None:
    """Seconds of a setting's training step, the mean over its runs."""
    times = [
        result.seconds_per_step
        for result in results[name].values()
        if isinstance(result, Results) and result.seconds_per_step is not None
    ]
    return mean(times) if times else None


def mean_std(scored: Sequence[float], digits: int = 1) -> str:
    """`12.0 ± 2.0`, mean and sample standard deviation; a single value has none, no value at all is a dash."""
    if not scored:
        return NOTHING
    return fixed(mean(scored), digits) + (f" ± {fixed(stdev(scored), digits)}" if len(scored) > 1 else "")


def _cells(study: Study, results: StudyResults, measure: Measure, digits: int = 1) -> dict[str, Cell]:
    """Setting → its mean and standard deviation, marked by rank."""
    scored = {setting.name: list(values(results, setting.name, measure).values()) for setting in study.settings}
    marks = rank([mean(runs) if runs and measure.compared else None for runs in scored.values()], digits)
    return {name: Cell(mean_std(runs, digits), mark) for (name, runs), mark in zip(scored.items(), marks, strict=True)}


def _describe_time(study: Study, results: StudyResults, name: str) -> str:
    ours, baseline = step_time(results, name), step_time(results, study.baseline)
    if ours is None:
        return ""
    return f"{1000 * ours:.0f} ms" + (f" (×{ours / baseline:.2f})" if baseline and name != study.baseline else "")


def _describe_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.1 else f"= {p:.2f}"
