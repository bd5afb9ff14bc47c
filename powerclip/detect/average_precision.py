"""AP50 of each class by pycocotools: COCO's own matching, at an IoU of 0.5, over boxes of all sizes.

OV-COCO is generalised: every class, base or novel, is a candidate for every box, and one set of detections is measured.
Means are over the classes that have a box.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from powerclip.detect.classes import Classes
from powerclip.detect.data import BoxSet, in_pixels
from powerclip.detect.detector import MOST, Detections

IOU = 0.5


@dataclass(frozen=True)
class AveragePrecision:
    """AP50 of each class, in its order, 0 to 1; None where there is no box of the class."""

    classes: Classes
    of_class: tuple[float | None, ...]

    def mean(self, numbers: Sequence[int]) -> float | None:
        """Over those of the classes that have a box; None when none has."""
        values = [value for number in numbers if (value := self.of_class[number]) is not None]
        return sum(values) / len(values) if values else None

    @property
    def scores(self) -> dict[str, float | None]:
        """The three numbers of Table 15."""
        return {
            "ap50_base": self.mean(self.classes.numbers(novel=False)),
            "ap50_novel": self.mean(self.classes.numbers(novel=True)),
            "ap50": self.mean(range(len(self.classes))),
        }


def average_precision(data: BoxSet, found: Mapping[int, Detections]) -> AveragePrecision:
    """How well detections, by the number of their image, fit the boxes of a set; an image without has none."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    results = coco_results(data, found)
    truth = COCO()
    truth.dataset = coco_truth(data)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does
        truth.createIndex()
        detected = truth.loadRes(results) if results else COCO()
        if not results:
            detected.dataset = {**truth.dataset, "annotations": []}
            detected.createIndex()
        evaluation = COCOeval(truth, detected, "bbox")
        settings = evaluation.params
        settings.iouThrs, settings.maxDets = np.array([IOU]), [MOST]
        settings.areaRng, settings.areaRngLbl = settings.areaRng[:1], settings.areaRngLbl[:1]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, 0]  # [recall steps, K]
    measured = [None if (column < 0).all() else float(column[column >= 0].mean()) for column in precision.T]
    return AveragePrecision(data.classes, tuple(measured))


def coco_truth(data: BoxSet) -> dict[str, Any]:
    """The boxes of a set in COCO's format, images and classes numbered from 1."""
    annotations: list[dict[str, Any]] = []
    for number, image in enumerate(data.images, 1):
        pixels = in_pixels(image.boxes.double(), image.size).tolist()
        for (x0, y0, x1, y1), label, crowd in zip(pixels, image.labels.tolist(), image.crowd.tolist(), strict=True):
            box = [x0, y0, x1 - x0, y1 - y0]
            about = {"image_id": number, "category_id": label + 1, "bbox": box, "area": box[2] * box[3]}
            annotations.append({"id": len(annotations) + 1, **about, "iscrowd": int(crowd)})
    images = [
        {"id": number, "file_name": image.name, "height": image.size[0], "width": image.size[1]}
        for number, image in enumerate(data.images, 1)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(data.classes.names, 1)]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def coco_results(data: BoxSet, found: Mapping[int, Detections]) -> list[dict[str, Any]]:
    """Detections in COCO's format for results, numbered as `coco_truth` does."""
    results = []
    for number, one in found.items():
        pixels = in_pixels(one.boxes.double(), data.images[number].size).tolist()
        for (x0, y0, x1, y1), label, score in zip(pixels, one.labels.tolist(), one.scores.tolist(), strict=True):
            box = [round(side, 3) for side in (x0, y0, x1 - x0, y1 - y0)]
            results.append({"image_id": number + 1, "category_id": label + 1, "bbox": box, "score": score})
    return results
