"""The kinds of benchmark: what each holds, and how an embedder scores it.

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
from powerclip.evaluate import metrics
from powerclip.evaluate.embedder import BATCH, Embedded, Embedder
from powerclip.evaluate.images import ImageSource
from powerclip.evaluate.metrics import Metrics
from powerclip.evaluate.probe import ProbeSettings, train_probe

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in shares of the image


@dataclass(frozen=True)
class Scored:
    """The result of a task: its metrics, and those of each of its parts (SugarCrepe's kinds)."""

    parts: dict[str, Metrics]  # name of the part, "" for the whole task → metrics
    counts: dict[str, int]
    corrupt: tuple[str, ...] = ()

    def flat(self) -> dict[str, float]:
        """`metric` of the whole task and `PART/acc` of each part → share, 0 to 1."""
        overall = self.parts.get("", {})
        parts = {f"{part}/acc": values.get("acc") for part, values in self.parts.items() if part}
        return {name: value for name, value in {**overall, **parts}.items() if value is not None}


@dataclass(frozen=True)
class Classification:
    """Images with one class each (labels [n]) or with several (labels [n, classes], 0 or 1)."""

    task: ClassVar[str] = "zeroshot_classification"
    images: ImageSource
    labels: Tensor
    classes: Sequence[str]
    templates: Sequence[str]

    @property
    def summary(self) -> str:
        """`1,000 images, 10 classes`."""
        return f"{len(self.images.names):,} images, {len(self.classes):,} classes"

    def score(self, embedder: Embedder) -> Scored:
        """Top-1 and top-5 accuracy and the mean recall of the classes; mean average precision for several labels."""
        _check_labels(self.labels, len(self.classes))
        directions = metrics.class_embeddings(embedder.texts, self.classes, self.templates)
        embedded = embedder.images(self.images)
        vectors, labels = embedded.vectors[embedded.readable], self.labels[embedded.readable]
        scores = vectors @ directions.T
        if labels.ndim == 2:
            scored: Metrics = {"mean_average_precision": metrics.mean_average_precision(scores, labels)}
        else:
            scored = metrics.classification(scores, labels)
        return Scored({"": scored}, {"images": len(vectors), "classes": len(self.classes)}, embedded.corrupt)


@dataclass(frozen=True)
class CaptionRetrieval:
    """Images and captions, all against all."""

    task: ClassVar[str] = "zeroshot_retrieval"
    images: ImageSource
    captions: Sequence[str]
    image_of_caption: Tensor  # [captions]

    @property
    def summary(self) -> str:
        """`1,000 images, 5,000 captions`."""
        return f"{len(self.images.names):,} images, {len(self.captions):,} captions"

    def score(self, embedder: Embedder) -> Scored:
        """Recall at 1, 5 and 10 in both directions, and their mean."""
        embedded = embedder.images(self.images)
        captions = embedder.texts(self.captions)
        kept = embedded.readable[self.image_of_caption]
        number = embedded.readable.cumsum(0) - 1  # among the readable ones
        vectors, owners = embedded.vectors[embedded.readable], number[self.image_of_caption[kept]]
        recalls = metrics.recall(vectors, captions[kept], owners)
        return Scored({"": recalls}, {"images": len(vectors), "captions": int(kept.sum())}, embedded.corrupt)


@dataclass(frozen=True)
class HardNegatives:
    """Comparisons: does an image prefer its caption to a false one?"""

    task: ClassVar[str] = "image_caption_selection"
    images: ImageSource
    image_of_item: Tensor  # [items]
    captions: Sequence[str]
    negatives: Sequence[str]
    kinds: Sequence[str]
    missing: int = 0  # comparisons whose image is missing

    @property
    def summary(self) -> str:
        """`517 comparisons, 6,994 left out: their images are not there`."""
        left_out = f", {self.missing:,} left out: their images are not there" if self.missing else ""
        return f"{len(self.captions):,} comparisons{left_out}"

    def score(self, embedder: Embedder) -> Scored:
        """Accuracy of all items and of each kind."""
        embedded = embedder.images(self.images)
        captions, negatives = embedder.texts(self.captions), embedder.texts(self.negatives)
        kept = embedded.readable[self.image_of_item]
        vectors = embedded.vectors[self.image_of_item[kept]]
        preferred = metrics.prefers_caption(vectors, captions[kept], negatives[kept])
        kinds = [kind for kind, keep in zip(self.kinds, kept.tolist(), strict=True) if keep]
        counts = {**Counter(kinds), **({"missing": self.missing} if self.missing else {})}
        return Scored(metrics.hard_negatives(preferred, kinds), counts, embedded.corrupt)


@dataclass(frozen=True)
class CaptionPairs:
    """Winoground: two images and two captions of the same words; image i of an item belongs to caption i."""

    task: ClassVar[str] = "image_caption_selection"
    images: ImageSource  # [2 · items], those of an item together
    captions: Sequence[str]  # likewise

    @property
    def summary(self) -> str:
        """`400 pairs of images and captions`."""
        return f"{len(self.captions) // 2:,} pairs of images and captions"

    def score(self, embedder: Embedder) -> Scored:
        """Items whose images both find their caption (text), whose captions find their image (image), and both."""
        embedded = embedder.images(self.images)
        captions = embedder.texts(self.captions).unflatten(0, (-1, 2))
        kept = embedded.readable.view(-1, 2).all(1)
        scores = embedded.vectors.unflatten(0, (-1, 2))[kept] @ captions[kept].mT  # [items, image, caption]
        return Scored({"": metrics.caption_pairs(scores)}, {"items": int(kept.sum())}, embedded.corrupt)


@dataclass(frozen=True)
class LinearProbe:
    """Two classification sets: a linear classifier is trained on the first and tested on the second."""

    task: ClassVar[str] = "linear_probe"
    train: Classification
    test: Classification
    settings: ProbeSettings = field(default_factory=ProbeSettings)

    @property
    def images(self) -> ImageSource:
        """Those that are classified."""
        return self.test.images

    @property
    def summary(self) -> str:
        """`10,000 images, 10 classes; trained on 50,000`."""
        return f"{self.test.summary}; trained on {len(self.train.labels):,}"

    def score(self, embedder: Embedder) -> Scored:
        """Accuracy of the trained classifier."""
        if self.train.labels.ndim != 1:
            raise UserError("a linear probe needs images with one class each")
        train, test = embedder.images(self.train.images), embedder.images(self.test.images)
        classes = int(self.train.labels.max()) + 1
        _check_labels(self.test.labels, classes)
        device = embedder.device
        vectors, labels = (part.to(device) for part in _readable(train, self.train.labels))
        layer = train_probe(vectors, labels, classes, self.settings)
        vectors, labels = (part.to(device) for part in _readable(test, self.test.labels))
        with torch.no_grad():
            accuracy = metrics.classification(layer(vectors), labels)
        counts = {"images": len(vectors), "trained on": int(train.readable.sum()), "classes": classes}
        scored: Metrics = {f"lp_{name}": value for name, value in accuracy.items()}
        return Scored({"": scored}, counts, (*train.corrupt, *test.corrupt))


@dataclass(frozen=True)
class PointingGame:
    """Phrases of captions, and the boxes of what they name: does the strongest patch lie in one of them?

    A phrase is embedded from the words of its caption (`words`, p_B of Eq. 3, as one leaf) and as a text (`text`).
    """

    task: ClassVar[str] = "pointing_game"
    images: ImageSource
    image_of_phrase: Sequence[int]  # T
    captions: Sequence[str]  # T
    spans: Sequence[Span]  # T, of the captions
    boxes: Sequence[Sequence[Box]]  # T
    objects: Sequence[Sequence[Box]] | None = None  # T, of all objects of the image: whether a phrase hits any of them

    @property
    def summary(self) -> str:
        """`1,000 images, 2,500 phrases`."""
        return f"{len(self.images.names):,} images, {len(self.spans):,} phrases"

    def score(self, embedder: Embedder) -> Scored:
        """Share of hits with both embeddings of a phrase, and of a patch that is drawn at random."""
        phrases = list(zip(self.captions, self.spans, strict=True))
        queries = {
            "words": embedder.phrases(self.captions, [_tree(caption, span) for caption, span in phrases]),
            "text": embedder.texts([caption[span.start : span.end] for caption, span in phrases]),
        }
        targets = {"": self._cells(self.boxes, embedder)}
        if self.objects is not None:
            targets["_any"] = self._cells(self.objects, embedder)
        hits = {f"pointing_{query}{which}": torch.zeros(len(phrases)) for which in targets for query in queries}
        phrases_of: dict[int, list[int]] = {}
        for phrase, image in enumerate(self.image_of_phrase):
            phrases_of.setdefault(image, []).append(phrase)

        def score_phrases(images: Sequence[int], patches: Tensor) -> None:
            """Score all phrases of some images, given their patches [batch, N, D]."""
            pairs = [(row, phrase) for row, image in enumerate(images) for phrase in phrases_of.get(image, [])]
            for start in range(0, len(pairs), BATCH):
                rows, numbers = torch.tensor(pairs[start : start + BATCH]).unbind(1)
                of_phrases = patches[rows.to(patches.device)]
                for query, directions in queries.items():
                    heat = metrics.patch_similarity(of_phrases, directions[numbers].to(patches.device))
                    heat = heat.unflatten(1, embedder.encoder.grid).cpu()
                    for which, inside in targets.items():
                        hits[f"pointing_{query}{which}"][numbers] = metrics.hits_cells(heat, inside[numbers]).float()

        embedded = embedder.patches(self.images, score_phrases)
        kept = embedded.readable[torch.tensor(self.image_of_phrase)]
        scored: Metrics = {name: embedder.ranks.sum(hit)[kept].double().mean().item() for name, hit in hits.items()}
        scored |= {f"pointing_chance{which}": inside[kept].double().mean().item() for which, inside in targets.items()}
        counts = {"images": int(embedded.readable.sum()), "phrases": int(kept.sum())}
        # The maximum lies at the centre of a patch: a box between the centres cannot be hit.
        small = int((~targets[""][kept].flatten(1).any(1)).sum())
        return Scored({"": scored}, {**counts, **({"too small": small} if small else {})}, embedded.corrupt)

    def _cells(self, boxes: Sequence[Sequence[Box]], embedder: Embedder) -> Tensor:
        """Which patches lie in one of the boxes of each phrase [T, rows, columns] bool."""
        grid = embedder.encoder.grid
        return torch.stack([metrics.cells_in_boxes(torch.tensor(several), grid).any(0) for several in boxes])


def _tree(caption: str, span: Span) -> Tree:
    """A tree with one node: the phrase, a leaf among the other words."""
    return Tree(tree_from_spans([span], caption).leaves, (span,))


Task = Classification | CaptionRetrieval | HardNegatives | CaptionPairs | LinearProbe | PointingGame


def _readable(embedded: Embedded, labels: Tensor) -> tuple[Tensor, Tensor]:
    return embedded.vectors[embedded.readable], labels[embedded.readable]


def _check_labels(labels: Tensor, classes: int) -> None:
    highest = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    if highest > classes or (labels.ndim == 2 and highest != classes):
        raise UserError(f"images are labelled with {highest} classes, but {classes} class names are known")
