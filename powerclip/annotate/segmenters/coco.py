"""Masks that exist already: a COCO-style JSON file with polygons or run lengths, for the images that it names.

A sample belongs to the image whose `file_name`, without folder and suffix, is its key, or whose `id` is; leading zeros
do not count.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from powerclip.annotate.segmenters.base import Masks, SegmenterImage, file_identity, no_masks
from powerclip.data.mask_codec import to_grid
from powerclip.errors import UserError


class CocoMasks:
    """Looks masks up instead of finding them."""

    name = "coco"
    version = "1"

    def __init__(self, path: Path | None):
        if path is None:
            raise UserError("segmenter coco: give the file with the masks: --weights instances_train2017.json")
        self._images, self._annotations = _read(path)
        self.options: dict[str, Any] = {"masks": file_identity(path)}

    def segment(self, images: Sequence[SegmenterImage]) -> list[Masks]:
        """The masks of each image, the largest first."""
        return [self._masks(entry) for entry in images]

    def _masks(self, entry: SegmenterImage) -> Masks:
        image = self._images.get(_plain(entry.key))
        if image is None:
            return no_masks()
        height, width = int(image["height"]), int(image["width"])
        masks = [_decode(annotation["segmentation"], height, width) for annotation in self._annotations[image["id"]]]
        largest_first = sorted((mask for mask in masks if mask.any()), key=np.sum, reverse=True)
        return np.stack([to_grid(mask) for mask in largest_first]) if largest_first else no_masks()


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], dict[Any, list[dict[str, Any]]]]:
    """Images by key, and annotations by image."""
    try:
        content = json.loads(path.read_text())
        by_key = {}
        for image in content["images"]:
            int(image["height"]), int(image["width"])
            by_key[_plain(str(image["id"]))] = image
        # A file name wins over a number when both are some sample's key.
        by_key |= {_plain(Path(image["file_name"]).stem): image for image in content["images"] if "file_name" in image}
        annotations = defaultdict(list)
        for annotation in content["annotations"]:
            if annotation.get("segmentation"):
                annotations[annotation["image_id"]].append(annotation)
    except FileNotFoundError:
        raise UserError(f"no file {path} with COCO's masks") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is no COCO file: {type(error).__name__} {error}; it needs images (id, height, width) and "
            "annotations (image_id, segmentation)"
        ) from None
    return by_key, annotations


def _plain(key: str) -> str:
    return key.lstrip("0") or "0"


def _decode(segmentation: Any, height: int, width: int) -> np.ndarray:
    """A segmentation, as COCO writes it in three ways, as a mask [height, width]."""
    from pycocotools import mask as coco

    if isinstance(segmentation, list):
        # pycocotools takes a list of four numbers for a box
        polygons = [polygon for polygon in segmentation if len(polygon) >= 6]
        runs = coco.merge(coco.frPyObjects(polygons, height, width)) if polygons else None
    elif isinstance(segmentation["counts"], list):
        runs = coco.frPyObjects(segmentation, height, width)
    else:
        runs = segmentation
    return np.zeros((height, width), bool) if runs is None else coco.decode(runs).astype(bool)
