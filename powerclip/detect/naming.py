"""Naming gold boxes: how well regions and texts are aligned, apart from whether boxes are found. It needs no training.

Each gold box gets the class of the nearest text embedding, among all classes, by one of three views:

    region     the mean of the tower's dense features under the box: what a detector has of this tower
    crop       the box cut out and embedded as an image of its own
    image      the whole image, so the same name for all of its boxes: what the scene alone gives away

and beside them what needs no model: chance, and the most frequent class. A detector's views are its `learned` opinion,
its `tower`'s, and `both`, as it detects.

Axes: n boxes of one image · R boxes of a batch · K classes · D width of the joint space
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.transforms.functional import to_pil_image

from powerclip.detect.classes import Classes
from powerclip.detect.data import BoxSet, in_pixels, read_in_batches
from powerclip.detect.detector import Detector, ScoredBoxes, region_embeddings, tower_maps
from powerclip.encoders import DualEncoder, preprocess_for
from powerclip.encoders.vision import patch_size
from powerclip.errors import UserError
from powerclip.evaluate.embedder import evaluating
from powerclip.evaluate.metrics import Metrics, classification

BATCH = 16  # images that pass the tower together
_CROPS = 256  # cut out boxes that do

OnImages = Callable[[int], None]  # is told how many more images are done


@dataclass
class Named:
    """The scores of every gold box, by view, and the right classes."""

    classes: Classes
    labels: list[Tensor] = field(default_factory=list)  # [n] of each image
    scores: dict[str, list[Tensor]] = field(default_factory=dict)  # view → [R, K] of each batch

    def add(self, labels: Sequence[Tensor], views: Mapping[str, Tensor]) -> None:
        """Note what each view says of the boxes of some images."""
        self.labels += labels
        for view, scores in views.items():
            self.scores.setdefault(view, []).append(scores.float().cpu())

    def accuracies(self) -> dict[str, dict[str, float]]:
        """View → `base`, `novel` and `all`: the share of boxes named right, and `…_mean`, the mean over classes.

        All classes are candidates for each box.

        Raises:
            UserError: there is no box.
        """
        if not self.labels:
            raise UserError("there is no box to name: none is annotated, or no image can be read")
        labels = torch.cat(self.labels)
        novel = torch.tensor(self.classes.novel)[labels]
        parts = {"base": ~novel, "novel": novel, "all": torch.ones_like(novel)}
        shown = {
            view: _of_parts(parts, partial(_by_scores, torch.cat(scores), labels))
            for view, scores in self.scores.items()
        }
        shown["most frequent class"] = _of_parts(parts, lambda rows: _always_one(labels[rows]))
        chance = 1 / len(self.classes)
        shown["chance"] = _of_parts(parts, lambda rows: {"acc1": chance, "mean_per_class_recall": chance})
        return shown


def _of_parts(parts: Mapping[str, Tensor], measure: Callable[[Tensor], Metrics]) -> dict[str, float]:
    values: dict[str, float] = {}
    for part, rows in parts.items():
        if rows.any():
            measured = measure(rows)
            values[part], values[f"{part}_mean"] = measured["acc1"] or 0.0, measured["mean_per_class_recall"] or 0.0
    return values


def _by_scores(scores: Tensor, labels: Tensor, rows: Tensor) -> Metrics:
    return classification(scores[rows], labels[rows])


def _always_one(labels: Tensor) -> Metrics:
    """What the most frequent class reaches when it is said of every box."""
    counts = labels.bincount()
    return {"acc1": float(counts.max() / counts.sum()), "mean_per_class_recall": 1 / int((counts > 0).sum())}


def name_gold_boxes(
    encoder: DualEncoder,
    data: BoxSet,
    classes: Tensor,
    size: int,
    *,
    bf16: bool = False,
    on_images: OnImages = lambda more: None,
) -> Named:
    """What a tower calls each gold box of images that are `size` long, given the classes' text embeddings [K, D]."""
    device, patch = classes.device, patch_size(encoder.clip.visual)[0]
    settings = encoder.clip.visual.preprocess_cfg
    transform = GeneralizedRCNNTransform(size, size, settings["mean"], settings["std"], size_divisible=patch).eval()
    preprocess = preprocess_for(encoder, resize_mode="squash")

    def embed(pixels: Sequence[Tensor]) -> Tensor:
        prepared = [preprocess(to_pil_image(one)) for one in pixels]
        parts = [torch.stack(prepared[k : k + _CROPS]) for k in range(0, len(prepared), _CROPS)]
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            return torch.cat([encoder.encode_image(part.to(device)).float() for part in parts])

    named = Named(data.classes)
    with evaluating(encoder):
        for numbers, images in read_in_batches(data, size, patch, BATCH):
            boxes, labels = _gold(data, numbers, images)
            if sum(map(len, boxes)):
                pixels = [image.to(device).float().div_(255) for image in images]
                listed, targets = transform(pixels, [{"boxes": one.to(device)} for one in boxes])
                dense = tower_maps(encoder, listed, patch, bf16=bf16)[1]
                cut = [crop for image, each in zip(images, boxes, strict=True) for crop in _crops(image, each)]
                counts = torch.tensor([len(one) for one in boxes], device=device)
                views = {
                    "region": region_embeddings(dense, [target["boxes"] for target in targets], patch),
                    "crop": embed(cut),
                    "image": embed(images).repeat_interleave(counts, dim=0),
                }
                named.add(labels, {view: embedded @ classes.T for view, embedded in views.items()})
            on_images(len(numbers))
    return named


def name_by_detector(
    detector: Detector, data: BoxSet, classes: Tensor, exponents: Tensor, on_images: OnImages = lambda more: None
) -> Named:
    """What a detector calls each gold box."""
    named = Named(data.classes)
    detector.eval()
    for numbers, images in read_in_batches(data, detector.config.size, detector.multiple, BATCH):
        boxes, labels = _gold(data, numbers, images)
        if sum(map(len, boxes)):
            learned, tower = detector.name_boxes(images, boxes, classes)
            both = ScoredBoxes(learned.new_zeros(len(learned), 4), learned, tower).score(exponents)
            named.add(labels, {"learned": learned, "tower": tower, "both": both})
        on_images(len(numbers))
    return named


def _gold(data: BoxSet, numbers: Sequence[int], images: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The boxes of images in their pixels, and their labels; crowds have no name."""
    boxes, labels = [], []
    for number, image in zip(numbers, images, strict=True):
        annotated = data.images[number]
        boxes.append(in_pixels(annotated.boxes[~annotated.crowd], (image.shape[1], image.shape[2])))
        labels.append(annotated.labels[~annotated.crowd])
    return boxes, labels


def _crops(image: Tensor, boxes: Tensor) -> list[Tensor]:
    """The boxes cut out of an image [3, H, W], of one pixel at least."""
    corners = torch.cat([boxes[:, :2].floor(), boxes[:, 2:].ceil()], 1).long().tolist()
    return [image[:, y0 : max(y1, y0 + 1), x0 : max(x1, x0 + 1)] for x0, y0, x1, y1 in corners]
