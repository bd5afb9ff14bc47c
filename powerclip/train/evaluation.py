"""What a recipe asks to be measured at the end of its run: found before the run begins, scored when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import tokenizer_for
from powerclip.train.data import CorpusStore, kept_size
from powerclip.train.recipe import Recipe

if TYPE_CHECKING:
    from powerclip.data.corpus import Corpus
    from powerclip.encoders import DualEncoder
    from powerclip.evaluate.sugarcrepe import SugarCrepe

Scores = dict[str, float]  # `benchmark/measure` → share of right answers, 0 to 1
Evaluation = Callable[["DualEncoder"], Mapping[str, float]]


def make_evaluation(recipe: Recipe, encoder: DualEncoder, store: CorpusStore | None = None) -> Evaluation | None:
    """The function that scores a model as `recipe.evaluation` says, or None when it asks for nothing.

    Everything that it needs is read here: what is missing shows before hours of training, not after.
    """
    asked, store = recipe.evaluation, store or CorpusStore()
    parts: list[Callable[[DualEncoder], Scores]] = []
    tokenizer = CaptionTokenizer(tokenizer_for(encoder))
    if asked.retrieval is not None:
        corpus = store.corpus(asked.retrieval, "evaluation.retrieval", kept_size(encoder.image_size))
        parts.append(lambda model: retrieval_scores(model, tokenizer, corpus))
    if asked.composition is not None:
        benchmark = store.comparisons(asked.composition, "evaluation.composition")
        parts.append(lambda model: composition_scores(model, tokenizer, benchmark))
    if asked.scenes:
        parts.append(lambda model: scene_scores(model, tokenizer, asked.scenes))
    if not parts:
        return None
    return lambda model: {name: score for part in parts for name, score in part(model).items()}


def retrieval_scores(encoder: DualEncoder, tokenizer: CaptionTokenizer, corpus: Corpus) -> Scores:
    """Recall on a held-out corpus."""
    from powerclip.evaluate.corpus import evaluate_corpus

    found = evaluate_corpus(encoder, tokenizer, corpus)
    return {
        "retrieval/mean": found.mean,
        "retrieval/r1": (found.text[1] + found.image[1]) / 2,
        **{f"retrieval/text_r{k}": value for k, value in found.text.items()},
        **{f"retrieval/image_r{k}": value for k, value in found.image.items()},
    }


def composition_scores(encoder: DualEncoder, tokenizer: CaptionTokenizer, benchmark: SugarCrepe) -> Scores:
    """SugarCrepe's accuracies."""
    from powerclip.evaluate.sugarcrepe import evaluate_sugarcrepe

    found = evaluate_sugarcrepe(encoder, tokenizer, benchmark)
    return {
        "composition/mean": found.mean,
        "composition/error": found.error,
        **{f"composition/{group}": value for group, value in found.groups.items()},
        **{f"composition/{kind}": value for kind, value in found.accuracy.items()},
    }


def scene_scores(encoder: DualEncoder, tokenizer: CaptionTokenizer, count: int) -> Scores:
    """The means of the benchmarks on the embedded test scenes."""
    from powerclip.evaluate.embeddings import device_of
    from powerclip.evaluate.scenes import evaluate_scenes

    found = evaluate_scenes(encoder, tokenizer, count=count, device=device_of(encoder))
    return {
        "scenes/retrieval": found.retrieval.mean,
        "scenes/zero_shot": found.zero_shot[1],
        "scenes/composition": found.composition_mean,
        "scenes/pointing": found.pointing["words"],
    }


def describe(scores: Mapping[str, float]) -> str:
    """The scores as one line: `retrieval 12.7 (R@1: text 5.1, image 4.2)  composition 55.3 ± 2.2`."""
    return "  ".join(_phrases({name: 100 * value for name, value in scores.items()}))


def _phrases(percent: Mapping[str, float]) -> Iterator[str]:
    if "retrieval/mean" in percent:
        text, image = percent["retrieval/text_r1"], percent["retrieval/image_r1"]
        yield f"retrieval {percent['retrieval/mean']:.1f} (R@1: text {text:.1f}, image {image:.1f})"
    if "composition/mean" in percent:
        yield f"composition {percent['composition/mean']:.1f} ± {percent['composition/error']:.1f}"
    scenes = [name for name in percent if name.startswith("scenes/")]
    if scenes:
        yield "scenes: " + ", ".join(f"{name.removeprefix('scenes/')} {percent[name]:.1f}" for name in scenes)
    for name, value in percent.items():
        if name.split("/")[0] not in ("retrieval", "composition", "scenes"):
            yield f"{name} {value:.1f}"
