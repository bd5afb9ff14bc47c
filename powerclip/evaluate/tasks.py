"""The kinds of benchmark: what each holds, and how an embedder scores it.

Axes: n images · T phrases · N patches · M regions of an image · D width
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from powerclip.data.trees import Span, Tree, tree_from_spans
from powerclip.errors import UserError
from powerclip.evaluate import metrics
from powerclip.evaluate.embedder import BATCH, Embedded, Embedder
from powerclip.evaluate.images import ImageSource
from powerclip.evaluate.metrics import Metrics
from powerclip.evaluate.probe import ProbeSettings, train_probe
from powerclip.evaluate.set_choice import SetChoice

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
        self.check_labels()
        directions = metrics.class_embeddings(embedder.texts, self.classes, self.templates)
        embedded = embedder.images(self.images)
        vectors, labels = embedded.vectors[embedded.readable], self.labels[embedded.readable]
        scored = metrics.classification_of(vectors @ directions.T, labels)
        return Scored({"": scored}, {"images": len(vectors), "classes": len(self.classes)}, embedded.corrupt)

    def check_labels(self) -> None:
        """UserError unless each label has a class."""
        _check_labels(self.labels, len(self.classes))


@dataclass(frozen=True)
class CaptionRetrieval:
    """Images and captions, all against all."""

    task: ClassVar[str] = "zeroshot_retrieval"
    images: ImageSource
    captions: Sequence[str]
    image_of_caption: Tensor  # [captions]
    note: str = ""  # of a table: which columns were read, and what was left out

    @property
    def summary(self) -> str:
        """`1,000 images, 5,000 captions`."""
        counts = f"{len(self.images.names):,} images, {len(self.captions):,} captions"
        return f"{counts}; {self.note}" if self.note else counts

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
        """Accuracy of all items and of each kind.

        `mean_image_acc` is that of the mean image, which sees nothing; `centred_acc` that of the images less their
        mean, where what the texts alone suggest counts for nothing.
        """
        embedded = embedder.images(self.images)
        captions, negatives = embedder.texts(self.captions), embedder.texts(self.negatives)
        kept = embedded.readable[self.image_of_item]
        vectors, captions, negatives = embedded.vectors[self.image_of_item[kept]], captions[kept], negatives[kept]
        preferred = metrics.prefers_caption(vectors, captions, negatives)
        mean = embedded.vectors[embedded.readable].mean(0)
        blind = metrics.prefers_caption(mean, captions, negatives)
        centred = metrics.prefers_caption(vectors - mean, captions, negatives)
        kinds = [kind for kind, keep in zip(self.kinds, kept.tolist(), strict=True) if keep]
        counts = {**Counter(kinds), **({"missing": self.missing} if self.missing else {})}
        parts = metrics.hard_negatives(preferred, kinds)
        parts[""] |= {"mean_image_acc": _mean(blind.double()), "centred_acc": _mean(centred.double())}
        for kind, value in metrics.accuracy_by_kind(blind, kinds).items():
            parts[kind]["mean_image_acc"] = value
        return Scored(parts, counts, embedded.corrupt)


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
        embedded, maps = self.maps(embedder, self.queries(embedder))
        return self.score_maps(embedded, maps, embedder.encoder.grid)

    def queries(self, embedder: Embedder) -> dict[str, Tensor]:
        """Both embeddings of the phrases [T, D]."""
        phrases = list(zip(self.captions, self.spans, strict=True))
        return {
            "words": embedder.phrases(self.captions, [_tree(caption, span) for caption, span in phrases]),
            "text": embedder.texts([caption[span.start : span.end] for caption, span in phrases]),
        }

    def maps(
        self,
        embedder: Embedder,
        queries: Mapping[str, Tensor],
        use: Callable[[int, Tensor], None] = lambda image, patches: None,
    ) -> tuple[Embedded, dict[str, Tensor]]:
        """The map of each phrase over its image, for each of the queries [T, D]: [T, rows, columns].

        `use` gets the number and the patches [N, D] of each image, under torchrun of this rank's images only. The
        maps of all phrases are kept: 80 MB for 100,000 of them on a grid of 14 × 14.
        """
        grid = embedder.encoder.grid
        maps = {query: torch.zeros(len(self.spans), *grid) for query in queries}
        phrases_of = self.phrases_of_images()

        def score_phrases(images: Sequence[int], patches: Tensor) -> None:
            """Score all phrases of some images, given their patches [batch, N, D]."""
            pairs = [(row, phrase) for row, image in enumerate(images) for phrase in phrases_of.get(image, [])]
            for start in range(0, len(pairs), BATCH):
                rows, numbers = torch.tensor(pairs[start : start + BATCH]).unbind(1)
                of_phrases = patches[rows.to(patches.device)]
                for query, directions in queries.items():
                    heat = metrics.patch_similarity(of_phrases, directions[numbers].to(patches.device))
                    maps[query][numbers] = heat.unflatten(1, grid).cpu()
            for image, own in zip(images, patches, strict=True):
                use(image, own)

        embedded = embedder.patches(self.images, score_phrases)
        return embedded, {query: embedder.ranks.sum(values) for query, values in maps.items()}

    def score_maps(self, embedded: Embedded, maps: Mapping[str, Tensor], grid: tuple[int, int]) -> Scored:
        """`pointing_QUERY` of each query that the maps were made for, and chance."""
        targets = {"": self.cells(self.boxes, grid)}
        if self.objects is not None:
            targets["_any"] = self.cells(self.objects, grid)
        kept = embedded.readable[torch.tensor(self.image_of_phrase)]
        scored: Metrics = {
            f"pointing_{query}{which}": metrics.hits_cells(heat[kept], inside[kept]).double().mean().item()
            for which, inside in targets.items()
            for query, heat in maps.items()
        }
        scored |= {f"pointing_chance{which}": inside[kept].double().mean().item() for which, inside in targets.items()}
        counts = {"images": int(embedded.readable.sum()), "phrases": int(kept.sum())}
        # The maximum lies at the centre of a patch: a box between the centres cannot be hit.
        small = int((~targets[""][kept].flatten(1).any(1)).sum())
        return Scored({"": scored}, {**counts, **({"too small": small} if small else {})}, embedded.corrupt)

    def phrases_of_images(self) -> dict[int, list[int]]:
        """Image → its phrases, in order."""
        phrases_of: dict[int, list[int]] = {}
        for phrase, image in enumerate(self.image_of_phrase):
            phrases_of.setdefault(image, []).append(phrase)
        return phrases_of

    @staticmethod
    def cells(boxes: Sequence[Sequence[Box]], grid: tuple[int, int]) -> Tensor:
        """Which patches lie in one of the boxes of each phrase [T, rows, columns] bool."""
        return metrics.union_masks(boxes, grid, metrics.cells_in_boxes)


@dataclass(frozen=True)
class Grounding:
    """Phrases of captions and the boxes of what they name: pointing with its baselines, swap and set accuracy.

    A map that only knows where things usually are can win at pointing. In swap accuracy, where two phrases of a caption
    must each prefer its own boxes, it gets 50 %. A map that only knows which phrase comes first can still gain there:
    so pairs whose more central phrase comes first, and last, are also counted apart. In set accuracy the regions are
    all gold boxes of an image, and the best set of them for a phrase shall be its own boxes.
    """

    task: ClassVar[str] = "grounding"
    # Boxes of a swapped pair share at most this much: where they lie on each other, neither is wrong.
    most_overlap: ClassVar[float] = 0.1
    # Overlaps are those on a fine grid, not on the model's, so that the pairs are the same for all models.
    fine_grid: ClassVar[tuple[int, int]] = (64, 64)
    bias_grid: ClassVar[tuple[int, int]] = (6, 6)  # where things usually are is a smooth matter
    most_regions: ClassVar[int] = 12  # an image with more has too many sets to try

    phrases: PointingGame
    caption_of_phrase: Sequence[int]  # T; phrases of one number are of the same sentence about the same image
    missing: int = 0  # captions whose image is not there
    set_score: metrics.SetScore = "cosine"

    @property
    def images(self) -> ImageSource:
        """Those that the captions describe."""
        return self.phrases.images

    @property
    def summary(self) -> str:
        """`1,000 images, 13,123 phrases, 5 captions left out: their images are not there`."""
        left_out = f", {self.missing:,} captions left out: their images are not there" if self.missing else ""
        return f"{self.phrases.summary}{left_out}"

    def score(self, embedder: Embedder) -> Scored:
        """All three, with both embeddings of a phrase."""
        game, grid = self.phrases, embedder.encoder.grid
        queries = game.queries(embedder)
        image_of_phrase = torch.tensor(game.image_of_phrase)
        other = metrics.phrases_of_other_images(image_of_phrase)
        others = {} if other is None else {f"{name}_other": vectors[other] for name, vectors in queries.items()}
        sets = SetChoice(game, queries, grid, self.set_score, self.most_regions)
        embedded, maps = game.maps(embedder, queries | others, sets.choose)
        relative = {f"{name}_relative": metrics.relative_maps(maps[name], image_of_phrase) for name in queries}
        pointing = game.score_maps(embedded, maps | relative, grid)
        kept = embedded.readable[image_of_phrase]
        fixed: Metrics = {"pointing_fixed_patch": metrics.best_fixed_patch(game.cells(game.boxes, grid)[kept])}
        swaps, pairs = self._swap(maps, [*queries], kept, grid)
        f1 = {query: embedder.ranks.sum(values) for query, values in sets.f1.items()}
        chosen = _set_metrics(f1, sets.has_sets & kept, torch.tensor([len(set(own)) for own in game.boxes]))
        counts = pointing.counts | {"pairs": pairs, "phrases with sets": int((sets.has_sets & kept).sum())}
        missing = {"missing": self.missing} if self.missing else {}
        return Scored({"": pointing.parts[""] | fixed | swaps | chosen}, counts | missing, embedded.corrupt)

    def _swap(
        self, maps: Mapping[str, Tensor], names: Sequence[str], kept: Tensor, grid: tuple[int, int]
    ) -> tuple[Metrics, int]:
        """Swap accuracy of all pairs, of those whose more central phrase comes first, or last, and balanced.

        Beside it, what fixed maps reach that know only which phrase comes first, or which is longer.
        """
        pairs, farther = self.swap_pairs
        readable = kept[pairs].all(1)
        pairs, farther = pairs[readable], farther[readable]
        masks = metrics.union_masks(self.phrases.boxes, grid)
        biases, weights = self._biases(pairs)
        found: Metrics = {}

        def add(name: str, hits: Tensor) -> None:
            found[f"swap_{name}"] = _mean(hits)
            found[f"swap_{name}_balanced"] = (weights * hits).sum().item() if len(hits) else None

        for query in names:
            hits = metrics.swap_hits(maps[query], masks, pairs)
            add(query, hits)
            found[f"swap_{query}_central_first"] = _mean(hits[farther < 0])
            found[f"swap_{query}_central_last"] = _mean(hits[farther > 0])
        for bias, differences in biases.items():
            add(f"by_{bias}", metrics.swap_hits_of_bias(differences))
        return found, len(pairs)

    def _biases(self, pairs: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """What place and length tell of pairs of phrases [pairs, 2], and weights under which they tell nothing [pairs].

        For each bias, the differences [pairs, cells] of the boxes of the first and the second, or of the longer and
        the shorter phrase. With the weights, each of the two lies in a cell as often as the other.
        """
        masks = metrics.union_masks(self.phrases.boxes, self.bias_grid)
        lengths = torch.tensor([span.end - span.start for span in self.phrases.spans])
        longer = torch.sign(lengths[pairs[:, 0]] - lengths[pairs[:, 1]])
        differences = metrics.mask_differences(masks, pairs)
        biases = {"order": differences, "length": differences * longer[:, None]}
        return biases, metrics.balancing_weights(torch.cat([*biases.values()], 1))

    @cached_property
    def swap_pairs(self) -> tuple[Tensor, Tensor]:
        """Pairs of phrases of one caption whose boxes hardly overlap [pairs, 2], the one that is named first in front.

        Beside them [pairs], how much farther from the middle of the image the first one's boxes lie than the other's.
        """
        phrases_of: dict[int, list[int]] = {}
        for phrase, caption in enumerate(self.caption_of_phrase):
            phrases_of.setdefault(caption, []).append(phrase)
        pairs: list[tuple[int, int]] = []
        farther: list[float] = []
        masks_of_phrases = metrics.union_masks(self.phrases.boxes, self.fine_grid)
        for own in phrases_of.values():
            ordered = sorted(own, key=lambda phrase: self.phrases.spans[phrase].start)
            masks = masks_of_phrases[ordered]
            distances = metrics.distances_to_middle(masks)
            apart = (metrics.mask_overlaps(masks) <= self.most_overlap).triu(1)
            for first, last in apart.nonzero().tolist():
                pairs.append((ordered[first], ordered[last]))
                farther.append(float(distances[first] - distances[last]))
        return torch.tensor(pairs, dtype=torch.long).view(-1, 2), torch.tensor(farther, dtype=torch.double)


def _set_metrics(f1: Mapping[str, Tensor], has_sets: Tensor, named: Tensor) -> Metrics:
    """Mean F1 and share of exact matches, of phrases that name one box and of those that name several."""
    return {
        f"set_{measure}_{query}_{which}": _mean(values[has_sets & chosen])
        for which, chosen in (("single", named == 1), ("several", named > 1))
        for measure, shares in (("f1", f1), ("exact", {query: (value == 1).double() for query, value in f1.items()}))
        for query, values in shares.items()
    }


def _mean(values: Tensor) -> float | None:
    """None where there is nothing to average."""
    return values.mean().item() if len(values) else None


def _tree(caption: str, span: Span) -> Tree:
    """A tree with one node: the phrase, a leaf among the other words."""
    return Tree(tree_from_spans([span], caption).leaves, (span,))


class Task(Protocol):
    """A benchmark: what it holds, and how an embedder scores it."""

    task: ClassVar[str]  # its kind, as results name it

    @property
    def images(self) -> ImageSource:
        """All that it shows to the model."""
        ...

    @property
    def summary(self) -> str:
        """What it holds, in a few words."""
        ...

    def score(self, embedder: Embedder) -> Scored:
        """Its metrics."""
        ...


def _readable(embedded: Embedded, labels: Tensor) -> tuple[Tensor, Tensor]:
    return embedded.vectors[embedded.readable], labels[embedded.readable]


def _check_labels(labels: Tensor, classes: int) -> None:
    highest = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    if highest > classes or (labels.ndim == 2 and highest != classes):
        raise UserError(f"images are labelled with {highest} classes, but {classes} class names are known")
