"""Retrieval, classification and composition scored by the parts of images and texts, all pairs or the best by cosine.

Re-ranking: of each query the k best by global embeddings, and what is level with the last of them, are ordered anew by
the other score; the rest stay behind them in their order.

Axes: n images · S targets (texts, or classes)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from powerclip.errors import UserError
from powerclip.evaluate import metrics
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.grid import captions_with_trees
from powerclip.evaluate.images import ImageSource
from powerclip.evaluate.pair_scores import Compared, ScoreSettings, compare_parts, parse_texts
from powerclip.evaluate.tasks import CaptionPairs, CaptionRetrieval, Classification, HardNegatives, Scored, Task


def score_by_parts(task: Task, embedder: Embedder, settings: ScoreSettings) -> Scored:
    """The metrics that a task has by global embeddings; not those of the mean image, which has no parts.

    Raises:
        UserError: the task does not compare images with texts.
    """
    match task:
        case CaptionRetrieval():
            return score_retrieval(task, embedder, settings)
        case Classification():
            return score_classification(task, embedder, settings)
        case HardNegatives():
            return score_negatives(task, embedder, settings)
        case CaptionPairs():
            return score_pairs(task, embedder, settings)
    raise UserError(
        f"--score {settings.score} is for retrieval, zero-shot classification and composition; "
        f"{task.task} does not compare images with texts: leave --score out"
    )


def score_retrieval(task: CaptionRetrieval, embedder: Embedder, settings: ScoreSettings) -> Scored:
    """Recall at 1, 5 and 10 in both directions, and their mean."""
    trees = None
    if settings.score == "powerset":
        trees = captions_with_trees(task, partial(parse_texts, embedder))
    by_image = by_text = wanted = None
    if settings.rerank:
        coarse = _coarse(task.images, embedder.texts(task.captions), embedder)
        by_image, by_text = among_best(coarse, settings.rerank), among_best(coarse.T, settings.rerank).T
        wanted = by_image | by_text
    found = compare_parts(embedder, task.images, task.captions, settings, trees=trees, wanted=wanted)
    kept = found.readable[task.image_of_caption]
    owners = (found.readable.cumsum(0) - 1)[task.image_of_caption[kept]]

    def chosen(matrix: Tensor) -> Tensor:
        return matrix[found.readable][:, kept]

    to_text, to_image = chosen(found.to_text), chosen(found.to_image)
    if by_image is not None and by_text is not None:
        to_text = reranked(chosen(coarse), to_text, chosen(by_image))
        to_image = reranked(chosen(coarse), to_image, chosen(by_text))
    counts = {"images": len(to_text), "captions": int(kept.sum())}
    return Scored({"": metrics.recall_of_scores(to_text, to_image, owners)}, counts, found.corrupt)


def score_classification(task: Classification, embedder: Embedder, settings: ScoreSettings) -> Scored:
    """Accuracies, or the mean average precision; a class's score is the mean over its prompts, as in FILIP."""
    task.check_labels()
    prompts = metrics.class_prompts(task.classes, task.templates)
    target = torch.arange(len(task.classes)).repeat_interleave(len(task.templates))
    wanted = None
    if settings.rerank:
        directions = metrics.class_embeddings(embedder.texts, task.classes, task.templates)
        coarse = _coarse(task.images, directions, embedder)
        wanted = among_best(coarse, settings.rerank)
    found = compare_parts(embedder, task.images, prompts, settings, target=target, wanted=wanted)
    scores, labels = found.to_text[found.readable], task.labels[found.readable]
    if wanted is not None:
        scores = reranked(coarse[found.readable], scores, wanted[found.readable])
    counts = {"images": len(scores), "classes": len(task.classes)}
    return Scored({"": metrics.classification_of(scores, labels)}, counts, found.corrupt)


def score_negatives(task: HardNegatives, embedder: Embedder, settings: ScoreSettings) -> Scored:
    """Accuracy of all items and of each kind."""
    texts = list(dict.fromkeys([*task.captions, *task.negatives]))
    number = {text: row for row, text in enumerate(texts)}
    pairs = [
        torch.stack([task.image_of_item, torch.tensor([number[text] for text in several])])
        for several in (task.captions, task.negatives)
    ]
    found = _compare_pairs(embedder, task.images, texts, settings, pairs)
    right, wrong = (found.to_text[image, text] for image, text in pairs)
    kept = found.readable[task.image_of_item]
    kinds = [kind for kind, keep in zip(task.kinds, kept.tolist(), strict=True) if keep]
    counts = {**Counter(kinds), **({"missing": task.missing} if task.missing else {})}
    return Scored(metrics.hard_negatives((right > wrong)[kept], kinds), counts, found.corrupt)


def score_pairs(task: CaptionPairs, embedder: Embedder, settings: ScoreSettings) -> Scored:
    """Winoground's three scores."""
    first = 2 * torch.arange(len(task.captions) // 2)
    pairs = [torch.stack([first + image, first + text]) for image in (0, 1) for text in (0, 1)]
    found = _compare_pairs(embedder, task.images, task.captions, settings, pairs)
    kept = found.readable.view(-1, 2).all(1)

    def square(matrix: Tensor) -> Tensor:
        return torch.stack([matrix[image, text] for image, text in pairs], 1).view(-1, 2, 2)[kept]

    scored = metrics.caption_pairs(square(found.to_text), square(found.to_image))
    return Scored({"": scored}, {"items": int(kept.sum())}, found.corrupt)


def _coarse(images: ImageSource, texts: Tensor, embedder: Embedder) -> Tensor:
    """Cosines [n, S] of global embeddings; images that cannot be read are behind all others."""
    embedded = embedder.images(images)
    return (embedded.vectors @ texts.T).masked_fill(~embedded.readable[:, None], -torch.inf)


def _compare_pairs(
    embedder: Embedder, images: ImageSource, texts: Sequence[str], settings: ScoreSettings, pairs: Sequence[Tensor]
) -> Compared:
    """The scores of some pairs of images and texts. Of so few candidates all are among the best."""
    wanted = torch.zeros(len(images.names), len(texts), dtype=torch.bool)
    for image, text in pairs:
        wanted[image, text] = True
    return compare_parts(embedder, images, texts, settings, wanted=wanted)


def among_best(scores: Tensor, count: int) -> Tensor:
    """Which of each row's scores [rows, columns] are not below its `count` best: bool. NaN is never below."""
    least = scores.topk(min(count, scores.shape[1])).values[:, -1:]
    return ~(scores < least)


def reranked(coarse: Tensor, fine: Tensor, best: Tensor) -> Tensor:
    """Scores [rows, columns] by which the `best` come first, in the order of `fine`, and the rest in that of `coarse`.

    NaN stays NaN, which counts against the model.
    """
    coarse, fine = coarse.double(), fine.double()
    # Scores of one kind are moved beyond all of the other.
    reach = 2 * max(part[part.isfinite()].abs().max().item() if part.isfinite().any() else 0 for part in (coarse, fine))
    return torch.where(best, fine + reach + 1, coarse)
