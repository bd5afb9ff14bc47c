"""Regions without a model: pieces of even colour, from fine to coarse (Felzenszwalb & Huttenlocher 2004).

They follow edges, not objects; but they need no GPU and no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from powerclip.annotate.segmenters.base import Masks, SegmenterImage, no_masks
from powerclip.annotate.segmenters.overlap import distinct
from powerclip.data.mask_codec import to_grid
from powerclip.errors import UserError


@dataclass(frozen=True)
class SuperpixelOptions:
    """What decides about the pieces."""

    side: int = 192  # pixels of the longer side, to which a larger image is brought
    finest: float = 100.0  # the first of three scales, each three times the one before; more gives larger pieces
    smallest: float = 0.005  # of the image's area
    largest: float = 0.9
    overlap: float = 0.7  # IoU from which on a piece is one of a coarser scale again
    most: int = 32  # pieces of one image, the largest

    def __post_init__(self) -> None:
        if self.side < 16 or self.finest <= 0 or self.most < 1:
            raise UserError("segmenter superpixels: side must be at least 16, finest above 0 and most at least 1")
        if not 0 <= self.smallest <= self.largest <= 1:
            raise UserError("segmenter superpixels: smallest and largest must lie between 0 and 1, in this order")


class Superpixels:
    """Felzenszwalb's segmentation at three scales."""

    name = "superpixels"
    version = "1"

    def __init__(self, **options: float):
        self._settings = SuperpixelOptions(**options)  # type: ignore[arg-type]
        self.options = asdict(self._settings)

    def segment(self, images: Sequence[SegmenterImage]) -> list[Masks]:
        """The pieces of each image, the largest first."""
        return [self._segment(image) for image in images]

    def _segment(self, image: SegmenterImage) -> Masks:
        from skimage.segmentation import felzenszwalb

        pixels = _shrink(image.pixels, self._settings.side)
        area = pixels.shape[0] * pixels.shape[1]
        masks = []
        for scale in (self._settings.finest * 3**step for step in range(3)):
            smallest = max(1, round(self._settings.smallest * area))
            pieces = felzenszwalb(pixels, scale=scale, sigma=0.8, min_size=smallest)
            masks += [pieces == piece for piece in range(pieces.max() + 1)]
        low, high = self._settings.smallest * area, self._settings.largest * area
        masks = sorted((mask for mask in masks if low <= mask.sum() <= high), key=np.sum, reverse=True)
        if not masks:
            return no_masks()
        on_grid = torch.from_numpy(np.stack([to_grid(mask) for mask in masks]))
        return distinct(on_grid, self._settings.overlap, self._settings.most).numpy()


def _shrink(pixels: np.ndarray, side: int) -> np.ndarray:
    """The image with a longer side of at most `side` pixels."""
    from PIL import Image

    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.BOX)
    return np.asarray(image)
