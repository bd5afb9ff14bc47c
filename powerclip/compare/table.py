"""The table of a study: means over seeds, differences to the baseline with a paired test, the cost of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from rich.text import Text

from powerclip.compare.significance import paired_error, paired_p
from powerclip.compare.study import Study
from powerclip.train.results import Results

Outcomes = dict[str, dict[int, Results | str]]  # setting → seed → results, or why there are none


@dataclass(frozen=True)
class Measure:
    """One thing that a run has measured, and how the table shows it."""

    key: str
    label: str
    compared: bool = True  # ranked, and compared with the baseline

    def value(self, results: Results) -> float | None:
        """Its value in a run, in percent; None when that was not measured."""
        found = results.scores.get(self.key, results.last.get(self.key))
        return None if found is None else 100 * found


MEASURES = (
    Measure("retrieval/mean", "retrieval"),
    Measure("retrieval/r1", "R@1"),
    Measure("retrieval/text_r1", "R@1 text", compared=False),
    Measure("retrieval/image_r1", "R@1 image", compared=False),
    Measure("composition/mean", "composition"),
    Measure("scenes/retrieval", "scenes: retrieval"),
    Measure("scenes/zero_shot", "scenes: zero-shot"),
    Measure("scenes/composition", "scenes: composition"),
    Measure("scenes/pointing", "scenes: pointing"),
    Measure("violation", "violation", compared=False),
    Measure("empty", "empty", compared=False),
)
COMPARED = tuple(measure for measure in MEASURES if measure.compared)


@dataclass(frozen=True)
class Difference:
    """What a setting gains over the baseline, on the seeds that both have finished."""

    gain: float
    error: float | None  # the standard error of the gain
    ratio: float | None
    p: float | None
    seeds: int

    def __str__(self) -> str:
        return self.shown()

    def shown(self, digits: int = 1, *, error: bool = False) -> str:
        """`+3.0 (×1.25, p = 0.035)`, with its standard error where that is asked for: `+3.0 ± 0.6 (…)`."""
        spread = f" ± {self.error:.{digits}f}" if error and self.error is not None else ""
        notes = [f"×{self.ratio:.2f}"] if self.ratio is not None else []
        notes += [f"p {_shown_p(self.p)}"] if self.p is not None else []
        return f"{_signed(self.gain, digits)}{spread}" + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class Cell:
    """A place in the table."""

    text: str
    mark: str = ""  # "best", "second" or nothing

    def markdown(self) -> str:
        """Best bold, second underlined."""
        return {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}[self.mark].format(self.text)


def markdown(study: Study, outcomes: Outcomes) -> str:
    """The table as Markdown."""
    legend = (
        f"Percent, mean ± standard deviation over seeds; Δ is the difference to {study.baseline}, with the ratio and "
        "the p-value of a paired t-test over seeds. Violation and empty are those of the last step, time is the median "
        "of a training step, where a run had its GPU to itself."
    )
    return page(study, *_grid(study, outcomes, MEASURES), legend)


def page(study: Study, header: Sequence[str], rows: Sequence[Sequence[Cell]], legend: str) -> str:
    """A table as Markdown between what the study is about and what its settings are."""
    lines = [f"| {' | '.join(header)} |", "|---" + "|---:" * (len(header) - 1) + "|"]
    lines += ["| " + " | ".join(cell.markdown() for cell in row) + " |" for row in rows]
    notes = [f"- {setting.name}: {setting.about}" for setting in study.settings if setting.about]
    intro = [study.about, ""] if study.about else []
    return "\n".join([*intro, *lines, "", *notes, *([""] if notes else []), legend])


def terminal(study: Study, outcomes: Outcomes, shown: Sequence[Measure] = COMPARED, *, time: bool = True) -> list[Text]:
    """The lines of the table for the terminal, without what is not compared. They are as wide as they need to be."""
    header, rows = _grid(study, outcomes, shown, time=time)
    grid = [[Cell(label) for label in header], *rows]
    widths = [max(len(row[place].text) for row in grid) for place in range(len(header))]
    styles = {"best": "bold", "second": "underline", "": ""}
    lines = []
    for row in grid:
        line = Text()
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            gap = " " * (width - len(cell.text))
            line.append("  " if place else "").append(gap if place else "")
            line.append(cell.text, styles[cell.mark]).append("" if place else gap)
        lines.append(line)
    return lines


def summary(study: Study, outcomes: Outcomes, name: str) -> dict[str, Any]:
    """The numbers behind a row of the table, for `results.json`."""
    return {**numbers(study, outcomes, name, MEASURES), "seconds_per_step": _step_time(outcomes, name)}


def numbers(study: Study, outcomes: Outcomes, name: str, measures: Sequence[Measure]) -> dict[str, Any]:
    """What a setting has scored, and what it gains over the baseline, by the measures' keys; in percent."""
    found: dict[str, Any] = {}
    for measure in measures:
        scored = list(values(outcomes, name, measure).values())
        if scored:
            change = difference(study, outcomes, name, measure) if measure.compared else None
            found[measure.key] = {
                "mean": mean(scored),
                "sd": stdev(scored) if len(scored) > 1 else None,
                "seeds": len(scored),
                "difference": change and change.gain,
                "standard_error": change and change.error,
                "ratio": change and change.ratio,
                "p": change and change.p,
            }
    return found


def failures(outcomes: Outcomes) -> list[str]:
    """A line for each run that has no results."""
    return [
        f"- {name}, seed {seed}, failed: {outcome}"
        for name, runs in outcomes.items()
        for seed, outcome in runs.items()
        if isinstance(outcome, str)
    ]


def _grid(
    study: Study, outcomes: Outcomes, shown: Sequence[Measure], *, time: bool = True
) -> tuple[list[str], list[list[Cell]]]:
    measures = [
        measure for measure in shown if any(values(outcomes, setting.name, measure) for setting in study.settings)
    ]
    header = ["setting"]
    for measure in measures:
        header += [measure.label, "Δ"] if measure.compared else [measure.label]
    time = time and any(_step_time(outcomes, setting.name) for setting in study.settings)
    header += ["time"] if time else []
    marks = {measure.key: ranks(study, outcomes, measure) for measure in measures if measure.compared}
    rows = []
    for setting in study.settings:
        row = [Cell(setting.name)]
        for measure in measures:
            scored = list(values(outcomes, setting.name, measure).values())
            row.append(Cell(mean_and_spread(scored), marks.get(measure.key, {}).get(setting.name, "")))
            if measure.compared:
                row.append(Cell(str(difference(study, outcomes, setting.name, measure) or "")))
        rows.append([*row, *([Cell(_time(study, outcomes, setting.name))] if time else [])])
    return header, rows


def values(outcomes: Outcomes, name: str, measure: Measure) -> dict[int, float]:
    """Seed → value, of the runs that have one."""
    found = {seed: measure.value(outcome) for seed, outcome in outcomes[name].items() if isinstance(outcome, Results)}
    return {seed: value for seed, value in found.items() if value is not None}


def difference(study: Study, outcomes: Outcomes, name: str, measure: Measure) -> Difference | None:
    """A setting against the baseline; None for the baseline itself, and where no seed has both."""
    if name == study.baseline:
        return None
    ours, baseline = values(outcomes, name, measure), values(outcomes, study.baseline, measure)
    seeds = [seed for seed in ours if seed in baseline]
    if not seeds:
        return None
    mine, theirs = [ours[seed] for seed in seeds], [baseline[seed] for seed in seeds]
    return Difference(
        gain=mean(mine) - mean(theirs),
        error=paired_error(mine, theirs),
        ratio=mean(mine) / mean(theirs) if mean(theirs) else None,
        p=paired_p(mine, theirs),
        seeds=len(seeds),
    )


def ranks(study: Study, outcomes: Outcomes, measure: Measure, digits: int = 1) -> dict[str, str]:
    """Setting → its mark, by the means as printed; those that share a place share its mark."""
    means = {
        setting.name: round(mean(scored), digits)
        for setting in study.settings
        if (scored := list(values(outcomes, setting.name, measure).values()))
    }
    places = sorted(set(means.values()), reverse=True)
    if len(places) < 2:
        return {}
    names = {places[0]: "best", places[1]: "second"} if len(means) > 2 else {places[0]: "best"}
    return {name: names.get(value, "") for name, value in means.items()}


def _step_time(outcomes: Outcomes, name: str) -> float | None:
    times = [
        outcome.seconds_per_step
        for outcome in outcomes[name].values()
        if isinstance(outcome, Results) and outcome.seconds_per_step is not None
    ]
    return mean(times) if times else None


def _time(study: Study, outcomes: Outcomes, name: str) -> str:
    ours, baseline = _step_time(outcomes, name), _step_time(outcomes, study.baseline)
    if ours is None:
        return ""
    return f"{1000 * ours:.0f} ms" + (f" (×{ours / baseline:.2f})" if baseline and name != study.baseline else "")


def mean_and_spread(scored: Sequence[float], digits: int = 1) -> str:
    """`12.0 ± 2.0`; a single value has no spread, none at all is a dash."""
    if not scored:
        return "–"
    return f"{mean(scored):.{digits}f}" + (f" ± {stdev(scored):.{digits}f}" if len(scored) > 1 else "")


def _signed(value: float, digits: int) -> str:
    text = f"{value:+.{digits}f}"
    return text[1:] if not text.strip("+-0.") else text.replace("-", "−")


def _shown_p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.1 else f"= {p:.2f}"
