"""The boxes that a detector finds in a set of images, and in one image for whatever a user names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from powerclip.detect.data import BoxSet, read_in_batches
from powerclip.detect.detector import Detections, Detector, ScoredBoxes, detections, on_cpu

BATCH = 16  # images that pass the detector together


def find_boxes(
    detector: Detector, data: BoxSet, classes: Tensor, on_image: Callable[[], None] = lambda: None
) -> Iterator[tuple[int, ScoredBoxes]]:
    """What a detector finds in each image of a set, with its number; in host memory. Unreadable images are left out."""
    detector.eval()
    for numbers, images in read_in_batches(data, detector.config.size, detector.multiple, BATCH):
        for number, found in zip(numbers, detector.find(images, classes), strict=True):
            yield number, on_cpu(found)
            on_image()


def detect(
    detector: Detector, data: BoxSet, classes: Tensor, exponents: Tensor, on_image: Callable[[], None] = lambda: None
) -> dict[int, Detections]:
    """The detections of each image of a set, by its number, given the exponents of the classes [K]."""
    found = find_boxes(detector, data, classes, on_image)
    return {number: detections(one, exponents) for number, one in found}
