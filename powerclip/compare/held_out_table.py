"""The table of a study's held-out scores: a row for each measure, a column for each setting and its gain."""

from __future__ import annotations

from collections.abc import Mapping

from powerclip.compare.study import Study, StudyResults
from powerclip.compare.table import Measure, markdown_page, measure_table
from powerclip.evaluate.retrieval import CUTOFFS, Retrieval
from powerclip.evaluate.sugarcrepe import CompositionResults
from powerclip.evaluate.tasks import Scored
from powerclip.train.results import Results

DIGITS = 2  # differences at the end of a study are small
LABELS = {
    "retrieval/mean": "mean recall",
    "retrieval/r1": "R@1",
    **{f"retrieval/text_r{k}": f"R@{k} text" for k in CUTOFFS},
    **{f"retrieval/image_r{k}": f"R@{k} image" for k in CUTOFFS},
    "composition/mean": "accuracy",
}
HEADLINES = ("retrieval/mean", "retrieval/r1", "composition/mean", "acc1", "mean_average_precision", "acc")


def flatten(scored: Scored) -> dict[str, float]:
    """What `powerclip evaluate` measured on one of the data, by the names of the training evaluation; 0 to 1."""
    whole = {name: value for name, value in scored.parts.get("", {}).items() if value is not None}
    if not whole:
        accuracy = {kind: metrics["acc"] or 0.0 for kind, metrics in scored.parts.items()}
        found = CompositionResults(accuracy, {kind: scored.counts[kind] for kind in accuracy}, 0)
        return {"composition/mean": found.mean, **{f"composition/{kind}": value for kind, value in accuracy.items()}}
    if "text_retrieval_recall@1" not in whole:
        return whole
    recall = Retrieval(
        text={k: whole[f"text_retrieval_recall@{k}"] for k in CUTOFFS},
        image={k: whole[f"image_retrieval_recall@{k}"] for k in CUTOFFS},
    )
    return {
        "retrieval/mean": recall.mean,
        "retrieval/r1": (recall.text[1] + recall.image[1]) / 2,
        **{f"retrieval/text_r{k}": value for k, value in recall.text.items()},
        **{f"retrieval/image_r{k}": value for k, value in recall.image.items()},
    }


def describe(measured: Mapping[str, Scored]) -> str:
    """`test-000: mean recall 12.7, R@1 4.6 · sugarcrepe: accuracy 55.3`."""
    parts = []
    for name, scored in measured.items():
        found = flatten(scored)
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
    return [Measure(key, _label(key)) for key in keys]


def headlines(tested: StudyResults) -> list[Measure]:
    """The measures that the terminal has room for."""
    return [measure for measure in measures(tested) if measure.key.endswith(tuple(f"/{key}" for key in HEADLINES))]


def markdown(study: Study, tested: StudyResults, *footer: str) -> str:
    """The table as Markdown: in each row the best bold, the second underlined."""
    legend = (
        f"Percent, mean ± standard deviation over seeds; Δ is the mean difference to {study.baseline} ± its standard "
        "error over the seeds that both have, with the ratio and the p-value of a paired t-test. Mean recall is that "
        "of R@1, 5 and 10 both ways, R@1 the mean of both ways; text asks with an image, image with a caption. "
        "Accuracy is that of all comparisons together."
    )
    table = measure_table(study, tested, measures(tested), corner="held-out", digits=DIGITS)
    return markdown_page(study, table, legend, *footer)


def _label(key: str) -> str:
    for known, label in LABELS.items():
        if key.endswith(f"/{known}"):
            return f"{key.removesuffix(f'/{known}')}: {label}"
    name, _, rest = key.partition("/composition/")
    if rest:
        return f"{name}: {rest}"
    name, _, rest = key.rpartition("/")
    return f"{name}: {rest}"
