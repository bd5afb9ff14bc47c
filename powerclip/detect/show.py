"""Boxes of whatever a user names, drawn into an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from powerclip.detect.detector import detections
from powerclip.detect.saved import TrainedDetector, load_detector
from powerclip.errors import UserError
from powerclip.evaluate.ground import open_image
from powerclip.evaluate.ground_figure import check_output
from powerclip.report.boxes import NamedBox, boxes_figure
from powerclip.report.heatmaps import save_png
from powerclip.runtime.distributed import choose_device


@dataclass(frozen=True)
class Shown:
    """What is drawn of the boxes that were found."""

    least: float = 0.05  # score
    most: int = 20  # boxes


def find_named(
    trained: TrainedDetector, image: Image.Image, phrases: Sequence[str] = (), shown: Shown | None = None
) -> list[NamedBox]:
    """The boxes of an image that show what the phrases name, the surest first; without phrases, any learned class.

    The learned classes always compete: a box must look more like the phrase than like any of them.
    """
    shown = shown or Shown()
    asked = list(dict.fromkeys(" ".join(phrase.split()) for phrase in phrases))
    if not all(asked):
        raise UserError("a phrase is empty: say what to look for")
    classes = trained.classes([*asked, *(name for name in trained.learned if name not in asked)])
    size = trained.detector.config.size
    fitting = image.convert("RGB")
    fitting.thumbnail((size, size), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(fitting)).permute(2, 0, 1)
    found = trained.detector.eval().find([pixels], trained.embed(classes))[0]
    best = detections(found, trained.exponents.of(classes).to(found.boxes.device))
    wanted = len(asked) or len(classes)
    rows = zip(best.boxes.tolist(), best.labels.tolist(), best.scores.tolist(), strict=True)
    boxes = [
        NamedBox((x0, y0, x1, y1), classes.names[label], score)
        for (x0, y0, x1, y1), label, score in rows
        if label < wanted and score >= shown.least
    ]
    return boxes[: shown.most]


def draw_boxes(
    image_path: Path,
    phrases: Sequence[str],
    model: str,
    output: Path,
    *,
    shown: Shown | None = None,
    device: str = "auto",
) -> list[NamedBox]:
    """Write the image with the boxes of the phrases as a PNG; gives what was drawn.

    Raises:
        UserError: no such image or detector, or an output that cannot be written.
    """
    target = check_output(output, "the boxes")
    image = open_image(image_path)
    trained = load_detector(model, choose_device(device, setting="--device"))
    boxes = find_named(trained, image, phrases, shown)
    figure = boxes_figure(torch.from_numpy(np.array(image)).permute(2, 0, 1), boxes)
    try:
        save_png(figure, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None
    return boxes
