"""Two models side by side: the lines of the comparison table, over one or several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from powerclip.evaluate.metrics import CUTOFFS, KINDS

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

    scores: Mapping[str, float]  # of the scenes: `TASK/metric` → share of right answers, 0 to 1
    counts: Mapping[str, int]  # how many scenes, images, classes, comparisons and phrases were looked at
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
    scores, counts = baseline[0].scores, baseline[0].counts
    lines: list[Line] = []

    def add(group: str, label: str, key: str, chance: float) -> None:
        baselines, mine = (tuple(100 * outcome.scores[key] for outcome in model) for model in (baseline, ours))
        lines.append(Line(group, label, "%", 100 * chance, baselines, mine))

    for k in CUTOFFS:
        add("Retrieval", f"image → text, R@{k}", f"retrieval/text_retrieval_recall@{k}", k / counts["retrieval"])
    for k in CUTOFFS:
        add("Retrieval", f"text → image, R@{k}", f"retrieval/image_retrieval_recall@{k}", k / counts["retrieval"])
    for k in (1, 5):
        add("Zero-shot", f"unseen pairs, top {k}", f"zero_shot/acc{k}", min(1.0, k / counts["classes"]))
    for kind in KINDS:
        if f"composition/{kind}/acc" in scores:
            add("Composition", KIND_LABELS[kind], f"composition/{kind}/acc", 0.5)
    add("Composition", "mean", "composition/mean_kind_acc", 0.5)
    # Untrained towers already point at objects, which stand out: whether at the right one is what matters.
    for way, asks in (("words", "in caption"), ("text", "alone")):
        for which, hit in (("", "its own"), ("_any", "any")):
            chance = scores[f"pointing/pointing_chance{which}"]
            add("Pointing game", f"{asks}: {hit}", f"pointing/pointing_{way}{which}", chance)
    seconds = [tuple(outcome.seconds for outcome in model) for model in (baseline, ours)]
    lines.append(Line("Training", "time", "s", None, seconds[0], seconds[1]))
    return lines
