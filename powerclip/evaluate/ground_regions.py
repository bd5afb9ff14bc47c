"""The regions of one image on a model's patch grid: random boxes, boxes that someone drew, or pieces of a segmenter.

Axes: M regions · N patches · K masks of a segmenter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from powerclip.alignment.regions import boxes_of, draw_boxes, regions_of
from powerclip.data.masks import crop_masks
from powerclip.errors import UserError, nearest
from powerclip.evaluate.region_sets import MOST_REGIONS

if TYPE_CHECKING:
    from PIL import Image

    from powerclip.annotate.segmenters import Segmenter

Box = tuple[float, float, float, float]  # left, top, right, bottom in shares of the image
RegionKind = Literal["random", "partition", "superpixels", "mobile_sam", "boxes"]

KINDS: tuple[RegionKind, ...] = ("random", "partition", "superpixels", "mobile_sam", "boxes")
SEGMENTED = ("superpixels", "mobile_sam")


@dataclass(frozen=True)
class Regions:
    """Which regions an image is divided into.

    Raises:
        UserError: an unknown kind, too many regions, or boxes without area.
    """

    kind: RegionKind = "random"
    count: int = 10  # M; of drawn boxes there are as many as there are
    seed: int = 0  # of random boxes, and of which pieces are taken when there are more
    largest: float = 0.5  # longest side of a random box, of the image's
    boxes: tuple[Box, ...] = ()  # what was drawn, when kind is boxes

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"regions are {', '.join(KINDS)}, not {self.kind!r}{nearest(str(self.kind), list(KINDS))}")
        if not 1 <= self.count <= MOST_REGIONS:
            raise UserError(f"{self.count} regions: 1 to {MOST_REGIONS} are possible, so that all sets can be tried")
        if not 0 < self.largest <= 1:
            raise UserError(f"the longest side of a box is a share of the image's, between 0 and 1, not {self.largest}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"the seed of the regions is a number from 0 to 2^32 - 1, not {self.seed}")
        if self.kind == "boxes":
            if not 1 <= len(self.boxes) <= MOST_REGIONS:
                raise UserError(f"{len(self.boxes)} boxes: draw 1 to {MOST_REGIONS}")
            for box in self.boxes:
                # Written so that NaN is refused as well.
                if not (0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1):
                    raise UserError(
                        f"box {list(box)}: left, top, right and bottom are shares of the image, left before right and "
                        "top above bottom"
                    )


def find_pieces(image: Image.Image, segmenter: Segmenter) -> Tensor:
    """The segmenter's masks of an image [K, G, G] on the sidecars' grid."""
    import numpy as np

    from powerclip.annotate.segmenters import SegmenterImage

    pixels = np.asarray(image.convert("RGB"))
    return torch.from_numpy(segmenter.segment([SegmenterImage("image", pixels)])[0])


def region_masks(regions: Regions, view: Box, grid: tuple[int, int], pieces: Tensor | None = None) -> Tensor:
    """The regions as patches [M, N] of the part of the image that a model sees.

    Args:
        regions: which ones.
        view: what the model sees, in shares of the image.
        grid: its rows and columns of patches.
        pieces: what `find_pieces` gave, for the kinds of a segmenter.

    Raises:
        UserError: a box or all pieces lie outside the view.
    """
    if regions.kind == "boxes":
        return _drawn(regions.boxes, view, grid)
    generator = torch.Generator().manual_seed(regions.seed)
    if regions.kind in ("random", "partition"):
        return regions_of(draw_boxes(1, regions.count, generator), grid, regions.kind, regions.largest)[0]
    if pieces is None:
        raise ValueError(f"regions of kind {regions.kind} need the pieces that a segmenter found")
    masks = crop_masks(pieces[None], torch.tensor([view]), grid)[0] if len(pieces) else pieces.flatten(1)
    masks = masks[masks.any(-1)] if len(masks) else masks
    if not len(masks):
        raise UserError(f"{regions.kind} found no piece in this image: choose random boxes, or draw some")
    # Drawn at random as in training; small pieces may cover the same patches, and once is enough.
    masks = masks[torch.randperm(len(masks), generator=generator)]
    distinct = list({bytes(mask.numpy()): number for number, mask in reversed(list(enumerate(masks)))}.values())
    return masks[sorted(distinct)[: regions.count]]


def _drawn(boxes: Sequence[Box], view: Box, grid: tuple[int, int]) -> Tensor:
    left, top, right, bottom = view
    width, height = right - left, bottom - top
    draws = []
    for x0, y0, x1, y1 in boxes:
        x0, x1 = (min(max((x - left) / width, 0.0), 1.0) for x in (x0, x1))
        y0, y1 = (min(max((y - top) / height, 0.0), 1.0) for y in (y0, y1))
        if x0 >= x1 or y0 >= y1:
            raise UserError("a box lies outside the part of the image that the model sees: draw it further inside")
        draws.append([(y0 + y1) / 2, y1 - y0, (x0 + x1) / 2, x1 - x0])
    return boxes_of(torch.tensor(draws).T.unsqueeze(1), grid)[0]
