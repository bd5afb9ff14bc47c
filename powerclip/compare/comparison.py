"""Two models side by side: the lines of the comparison table, over one or several seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from powerclip.evaluate.composition import KINDS
from powerclip.evaluate.scenes import SceneResults

KIND_LABELS = {
    "replace_obj": "replace an object",
    "replace_att": "replace an attribute",
    "replace_rel": "replace a relation",
    "swap_obj": "swap two objects",
    "swap_att": "swap two attributes",
    "add_obj": "add an object",
    "add_att": "add an attribute",
}


@dataclass(frozen=True)
class Outcome:
    """One trained model: what it scored and how long its training took."""

    results: SceneResults
    seconds: float


@dataclass(frozen=True)
class Line:
    """One measure of both models, a value for each seed."""

    group: str
    label: str
    unit: str  # "%" (values are percentages) or "s"
    chance: float | None
    baseline: tuple[float, ...]
    ours: tuple[float, ...]

    @property
    def difference(self) -> float:
        """Mean of ours minus mean of the baseline."""
        return mean(self.ours) - mean(self.baseline)

    @property
    def ahead(self) -> str:
        """Who is ahead as printed: "baseline", "ours", or "" when the two round to the same."""
        gap = round(self.difference, 1) if self.unit == "%" else 0.0  # time is a cost, not a contest
        return "" if gap == 0 else "ours" if gap > 0 else "baseline"


def show(values: Sequence[float], unit: str = "%") -> str:
    """`61.3`, or `61.3 ± 0.8` (mean and sample standard deviation) over several seeds; times as `141 ± 8 s`."""
    digits, ending = (0, " s") if unit == "s" else (1, "")
    text = f"{mean(values):.{digits}f}"
    return (text if len(values) == 1 else f"{text} ± {stdev(values):.{digits}f}") + ending


def compare(baseline: Sequence[Outcome], ours: Sequence[Outcome]) -> list[Line]:
    """The table: outcome i of both models comes from the same seed and the same scenes."""
    if not baseline or len(baseline) != len(ours):
        raise ValueError(f"{len(baseline)} outcomes of one model and {len(ours)} of the other")
    chance = baseline[0].results.chance
    lines: list[Line] = []

    def add(group: str, label: str, get: Callable[[SceneResults], float], by_chance: float | None) -> None:
        lines.append(
            Line(
                group,
                label,
                "%",
                None if by_chance is None else 100 * by_chance,
                tuple(100 * get(outcome.results) for outcome in baseline),
                tuple(100 * get(outcome.results) for outcome in ours),
            )
        )

    scenes = baseline[0].results.counts["retrieval"]
    for k in baseline[0].results.retrieval.text:
        add("Retrieval", f"image → text, R@{k}", lambda r, k=k: r.retrieval.text[k], k / scenes)  # type: ignore[misc]
    for k in baseline[0].results.retrieval.image:
        add("Retrieval", f"text → image, R@{k}", lambda r, k=k: r.retrieval.image[k], k / scenes)  # type: ignore[misc]
    classes = baseline[0].results.counts["classes"]
    for k in baseline[0].results.zero_shot:
        label = f"unseen pairs, top {k}"
        add("Zero-shot", label, lambda r, k=k: r.zero_shot[k], min(1.0, k / classes))  # type: ignore[misc]
    for kind in _ordered(baseline[0].results.composition):
        label = KIND_LABELS.get(kind, kind)
        add("Composition", label, lambda r, kind=kind: r.composition[kind], 0.5)  # type: ignore[misc]
    add("Composition", "mean", lambda r: r.composition_mean, 0.5)
    # Untrained towers already point at objects, which stand out: whether at the right one is what matters.
    chance_any = baseline[0].results.chance_any
    add("Pointing game", "in caption: its own", lambda r: r.pointing["words"], chance)
    add("Pointing game", "in caption: any", lambda r: r.pointing_any["words"], chance_any)
    add("Pointing game", "alone: its own", lambda r: r.pointing["text"], chance)
    add("Pointing game", "alone: any", lambda r: r.pointing_any["text"], chance_any)
    seconds = [tuple(outcome.seconds for outcome in model) for model in (baseline, ours)]
    lines.append(Line("Training", "time", "s", None, seconds[0], seconds[1]))
    return lines


def _ordered(composition: Mapping[str, float]) -> list[str]:
    return [kind for kind in KINDS if kind in composition]
