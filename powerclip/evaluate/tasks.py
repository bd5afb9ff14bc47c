"""The kinds of benchmark: what each holds, and its metrics by the names that clip-benchmark gives them.

Axes: n images · T phrases · D width
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from powerclip.data.trees import Span, Tree, tree_from_spans
from powerclip.errors import UserError
from powerclip.evaluate import composition, pointing, retrieval
from powerclip.evaluate.embedder import Embedded, Embedder
from powerclip.evaluate.embeddings import BATCH, device_of
from powerclip.evaluate.heatmap import patch_similarity, text_queries, word_queries
from powerclip.evaluate.images import ImageSource
from powerclip.evaluate.probe import ProbeSettings, train_probe
from powerclip.evaluate.zero_shot import class_embeddings, top_accuracy

Metrics = dict[str, float | None]
Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in shares of the image


@dataclass(frozen=True)
class Scored:
    """What a benchmark gave: metrics for it, or for each of its parts (SugarCrepe's kinds)."""

    parts: dict[str, Metrics]  # name of the part, "" for the whole → metrics
    counts: dict[str, int]
    corrupt: tuple[str, ...] = ()


@dataclass(frozen=True)
class Classification:
    """Images with one class each (labels [n]) or with several (labels [n, classes], 0 or 1)."""

    task: ClassVar[str] = "zeroshot_classification"
    images: ImageSource
    labels: Tensor
    classes: Sequence[str]
    templates: Sequence[str]

    def score(self, embedder: Embedder) -> Scored:
        """Top-1 and top-5 accuracy and the mean recall of the classes; mean average precision for several labels."""
        _check_labels(self.labels, len(self.classes))
        directions = class_embeddings(embedder.texts, self.classes, self.templates)
        embedded = embedder.images(self.images)
        vectors, labels = embedded.vectors[embedded.readable], self.labels[embedded.readable]
        if labels.ndim == 2:
            metrics: Metrics = {"mean_average_precision": mean_average_precision(vectors @ directions.T, labels)}
        else:
            metrics = classification_metrics(vectors @ directions.T, labels)
        return Scored({"": metrics}, {"images": len(vectors), "classes": len(self.classes)}, embedded.corrupt)


@dataclass(frozen=True)
class CaptionRetrieval:
    """Images and captions, all against all."""

    task: ClassVar[str] = "zeroshot_retrieval"
    images: ImageSource
    captions: Sequence[str]
    image_of_caption: Tensor  # [captions]

    def score(self, embedder: Embedder) -> Scored:
        """Recall at 1, 5 and 10, both ways."""
        embedded = embedder.images(self.images)
        captions = embedder.texts(self.captions)
        kept = embedded.readable[self.image_of_caption]
        place = embedded.readable.cumsum(0) - 1  # among the readable ones
        vectors, owners = embedded.vectors[embedded.readable], place[self.image_of_caption[kept]]
        found = retrieval.recall(vectors, captions[kept], owners)
        metrics: Metrics = {f"image_retrieval_recall@{k}": value for k, value in found.image.items()}
        metrics |= {f"text_retrieval_recall@{k}": value for k, value in found.text.items()}
        return Scored({"": metrics}, {"images": len(vectors), "captions": int(kept.sum())}, embedded.corrupt)


@dataclass(frozen=True)
class HardNegatives:
    """Comparisons: does an image prefer its caption to a false one?"""

    task: ClassVar[str] = "image_caption_selection"
    images: ImageSource
    image_of_item: Tensor  # [items]
    captions: Sequence[str]
    negatives: Sequence[str]
    kinds: Sequence[str]
    missing: int = 0  # comparisons whose image is not there

    def score(self, embedder: Embedder) -> Scored:
        """Accuracy of each kind. Of one image, the image accuracy is 1 by definition."""
        embedded = embedder.images(self.images)
        captions, negatives = embedder.texts(self.captions), embedder.texts(self.negatives)
        kept = embedded.readable[self.image_of_item]
        vectors = embedded.vectors[self.image_of_item[kept]]
        preferred = composition.prefers_caption(vectors, captions[kept], negatives[kept])
        kinds = [kind for kind, keep in zip(self.kinds, kept.tolist(), strict=True) if keep]
        by_kind = composition.accuracy_by_kind(preferred, kinds)
        parts: dict[str, Metrics] = {
            kind: {"image_acc": 1.0, "text_acc": value, "acc": value} for kind, value in by_kind.items()
        }
        counts = {**Counter(kinds), **({"missing": self.missing} if self.missing else {})}
        return Scored(parts, counts, embedded.corrupt)


@dataclass(frozen=True)
class CaptionPairs:
    """Winoground: two images and two captions of the same words; image i of an item belongs to caption i."""

    task: ClassVar[str] = "image_caption_selection"
    images: ImageSource  # [2 · items], those of an item together
    captions: Sequence[str]  # likewise

    def score(self, embedder: Embedder) -> Scored:
        """Items whose images both find their caption (text), whose captions find their image (image), and both."""
        embedded = embedder.images(self.images)
        captions = embedder.texts(self.captions).unflatten(0, (-1, 2))
        kept = embedded.readable.view(-1, 2).all(1)
        scores = embedded.vectors.unflatten(0, (-1, 2))[kept] @ captions[kept].mT  # [items, image, caption]
        metrics: Metrics = dict(pair_accuracy(scores))
        return Scored({"": metrics}, {"items": int(kept.sum())}, embedded.corrupt)


@dataclass(frozen=True)
class LinearProbe:
    """Two classification sets: a linear classifier is trained on the first and tested on the second."""

    task: ClassVar[str] = "linear_probe"
    train: Classification
    test: Classification
    settings: ProbeSettings = field(default_factory=ProbeSettings)

    def score(self, embedder: Embedder) -> Scored:
        """Accuracy of the trained classifier."""
        if self.train.labels.ndim != 1:
            raise UserError("a linear probe needs images with one class each")
        seen, unseen = embedder.images(self.train.images), embedder.images(self.test.images)
        classes = int(self.train.labels.max()) + 1
        _check_labels(self.test.labels, classes)
        device = device_of(embedder.encoder)
        vectors, labels = (part.to(device) for part in _readable(seen, self.train.labels))
        layer = train_probe(vectors, labels, classes, self.settings)
        vectors, labels = (part.to(device) for part in _readable(unseen, self.test.labels))
        with torch.no_grad():
            found = classification_metrics(layer(vectors), labels)
        counts = {"images": len(vectors), "trained on": int(seen.readable.sum()), "classes": classes}
        metrics = {f"lp_{name}": value for name, value in found.items()}
        return Scored({"": metrics}, counts, (*seen.corrupt, *unseen.corrupt))


@dataclass(frozen=True)
class PointingGame:
    """Phrases of captions, and the boxes of what they name: does the strongest patch lie in one of them?

    A phrase asks in its caption (`words`, by p_B of Eq. 3, as one leaf) and as a caption of its own (`text`).
    """

    task: ClassVar[str] = "pointing_game"
    images: ImageSource
    image_of_phrase: Sequence[int]  # T
    captions: Sequence[str]  # T
    spans: Sequence[Span]  # T, of the captions
    boxes: Sequence[Sequence[Box]]  # T

    def score(self, embedder: Embedder) -> Scored:
        """Share of hits for both ways to ask, and of a patch that is drawn at random."""
        grid = embedder.encoder.grid
        inside = torch.stack([pointing.cells_in_boxes(torch.tensor(own), grid).any(0) for own in self.boxes])
        hits = torch.zeros(len(self.spans), 2)  # words, text
        asked: dict[int, list[int]] = {}
        for place, image in enumerate(self.image_of_phrase):
            asked.setdefault(image, []).append(place)

        def ask(images: Sequence[int], patches: Tensor) -> None:
            """Play all phrases of some images, given their patches [images, N, D]."""
            which = [(row, place) for row, image in enumerate(images) for place in asked[image]]
            for start in range(0, len(which), BATCH):
                part = which[start : start + BATCH]
                places = [place for _, place in part]
                rows = torch.tensor([row for row, _ in part], device=patches.device)
                for way, queries in enumerate(self._queries(embedder, places)):
                    heat = patch_similarity(patches[rows], queries).unflatten(1, grid)
                    hits[torch.tensor(places), way] = pointing.hits_cells(heat.cpu(), inside[places]).float()

        seen = embedder.patches(self.images, ask)
        hits = embedder.ranks.sum(hits)
        kept = seen.readable[torch.tensor(self.image_of_phrase)]
        words, text = hits[kept].double().mean(0).tolist()
        metrics: Metrics = {"pointing_words": words, "pointing_text": text}
        metrics["pointing_chance"] = inside[kept].double().mean().item()
        counts = {"images": int(seen.readable.sum()), "phrases": int(kept.sum())}
        # The maximum lies at the centre of a patch: a box between the centres cannot be hit.
        small = int((~inside[kept].flatten(1).any(1)).sum())
        return Scored({"": metrics}, {**counts, **({"too small": small} if small else {})}, seen.corrupt)

    def _queries(self, embedder: Embedder, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Directions [T, D] that phrases ask for: from the words of their captions, and alone."""
        encoder, tokenizer = embedder.encoder, embedder.tokenizer
        captions, spans = [self.captions[place] for place in places], [self.spans[place] for place in places]
        trees = [_tree(caption, span) for caption, span in zip(captions, spans, strict=True)]
        alone = [caption[span.start : span.end] for caption, span in zip(captions, spans, strict=True)]
        return word_queries(encoder, tokenizer, captions, trees), text_queries(encoder, tokenizer, alone)


def _tree(caption: str, span: Span) -> Tree:
    """A tree with one node: the phrase, a leaf among the other words."""
    whole = tree_from_spans([span], caption)
    return Tree(whole.leaves, (span,))


Task = Classification | CaptionRetrieval | HardNegatives | CaptionPairs | LinearProbe | PointingGame


def classification_metrics(scores: Tensor, labels: Tensor) -> Metrics:
    """Of scores [n, classes] and labels [n]. Top-5 needs five classes; classes that do not occur have no recall."""
    classes = scores.shape[1]
    top = top_accuracy(scores, labels)
    hits = (scores.argmax(1) == labels).double()
    present = torch.bincount(labels, minlength=classes).double()
    recalls = torch.bincount(labels, weights=hits, minlength=classes)[present > 0] / present[present > 0]
    return {
        "acc1": top[1],
        "acc5": top[5] if classes >= 5 else None,
        "mean_per_class_recall": recalls.mean().item(),
    }


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """Over classes, of scores and labels [n, classes]; a class without an image counts as 0, as in clip-benchmark."""
    truth = labels.gather(0, scores.argsort(dim=0, descending=True)).double()
    precision = truth.cumsum(0) / torch.arange(1, len(truth) + 1)[:, None]
    return ((precision * truth).sum(0) / truth.sum(0).clamp(min=1)).mean().item()


def pair_accuracy(scores: Tensor) -> dict[str, float]:
    """Winoground's three scores of [items, 2 images, 2 captions]. A draw is a miss."""
    text = (scores[:, 0, 0] > scores[:, 0, 1]) & (scores[:, 1, 1] > scores[:, 1, 0])
    image = (scores[:, 0, 0] > scores[:, 1, 0]) & (scores[:, 1, 1] > scores[:, 0, 1])
    values = {"image_acc": image, "text_acc": text, "acc": image & text}
    return {name: hits.double().mean().item() for name, hits in values.items()}


def _readable(embedded: Embedded, labels: Tensor) -> tuple[Tensor, Tensor]:
    return embedded.vectors[embedded.readable], labels[embedded.readable]


def _check_labels(labels: Tensor, classes: int) -> None:
    highest = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    if highest > classes or (labels.ndim == 2 and highest != classes):
        raise UserError(f"images are labelled with {highest} classes, but {classes} class names are known")
