"""The table of a study's held-out scores: a row for each measure, a column for each setting and its gain."""

from __future__ import annotations

from collections.abc import Mapping

from powerclip.compare.study import Study, StudyResults
from powerclip.compare.table import Measure, markdown_page, measure_table
from powerclip.evaluate.metrics import CUTOFFS
from powerclip.evaluate.tasks import Scored
from powerclip.train.results import Results

DIGITS = 2  # differences at the end of a study are small
LABELS = {
    "mean_recall": "mean recall",
    **{f"{side}_retrieval_recall@{k}": f"R@{k} {side}" for side in ("text", "image") for k in CUTOFFS},
    "acc": "accuracy",
    "mean_kind_acc": "mean of kinds",
}
HEADLINES = ("mean_recall", "acc1", "mean_average_precision", "acc")


def describe(measured: Mapping[str, Scored]) -> str:
    """`test-000: mean recall 12.7, R@1 4.6 · sugarcrepe: accuracy 55.3`."""
    parts = []
    for name, scored in measured.items():
        found = scored.flat()
        shown = [f"{LABELS.get(key, key)} {100 * found[key]:.1f}" for key in HEADLINES if key in found]
        parts.append(f"{name}: {', '.join(shown)}")
    return " · ".join(parts)


def measures(tested: StudyResults) -> list[Measure]:
    """All that was measured, `NAME: what`, in the order in which it was."""
    keys: dict[str, None] = {}
    for runs in tested.values():
        for result in runs.values():
            if isinstance(result, Results):
                keys |= dict.fromkeys(result.scores)
    # A standard error is nothing to be ahead in.
    return [Measure(key, _label(key)) for key in keys if _metric(key) != "acc_standard_error"]


def headlines(tested: StudyResults) -> list[Measure]:
    """The measures that the terminal has room for."""
    return [
        measure for measure in measures(tested) if measure.key.count("/") == 1 and _metric(measure.key) in HEADLINES
    ]


def markdown(study: Study, tested: StudyResults, *footer: str) -> str:
    """The table as Markdown: in each row the best bold, the second underlined."""
    legend = (
        f"Percent, mean ± standard deviation over seeds; Δ is the mean difference to {study.baseline} ± its standard "
        "error over the seeds that both have, with the ratio and the p-value of a paired t-test. Mean recall is that "
        "of R@1, 5 and 10 both ways; text asks with an image, image with a caption. Accuracy is that of all "
        "comparisons together."
    )
    table = measure_table(study, tested, measures(tested), corner="held-out", digits=DIGITS)
    return markdown_page(study, table, legend, *footer)


def _metric(key: str) -> str:
    return key.rpartition("/")[2]


def _label(key: str) -> str:
    name, *kind = key.split("/")[:-1]
    return f"{name}: {kind[0] if kind else LABELS.get(_metric(key), _metric(key))}"
