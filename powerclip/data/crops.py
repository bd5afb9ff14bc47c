"""Which part of an image a sample shows: a random crop as a function of four uniform numbers.

As torchvision's RandomResizedCrop, with the shape bounded so that the crop fits instead of up to ten attempts: nothing
has to be drawn again, and crops of a whole batch are a few operations on any device.

Axes: C images
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from powerclip.data.keyed_random import uniforms

Array = TypeVar("Array", Tensor, npt.NDArray[np.float64])

_WIDEST = math.log(4 / 3)  # aspect ratios of crops lie in [3/4, 4/3], torchvision's default


def crop_boxes(draws: Array, smallest: float, ratio: float = 1.0) -> Array:
    """Crops [C, 4] of images: left, top, right, bottom as shares of the image's width and height.

    The area is uniform between `smallest` and 1 of the image's; the logarithm of the aspect ratio is uniform within
    ±log 4/3, as far as a crop of that area fits into the image. Where none does, the crop is the largest one in the
    middle whose aspect ratio is allowed.

    Args:
        draws: uniform numbers in [0, 1) [C, 4]: area, aspect ratio, horizontal and vertical position. A tensor on any
            device, or an array: of a single image numpy makes a crop in a third of the time.
        smallest: share of the area that a crop keeps at least.
        ratio: width over height of the images.
    """
    library: Any = torch if isinstance(draws, Tensor) else np
    area = library.log(smallest + (1 - smallest) * draws[:, 0])
    wide = math.log(ratio)
    # A crop of area s and aspect ratio a fits into an image of ratio r when s·r ≤ a ≤ r/s.
    low, high = (wide + area).clip(min=-_WIDEST), (wide - area).clip(max=_WIDEST)
    fits = low <= high
    largest = min(max(wide, -_WIDEST), _WIDEST)
    aspect = library.where(fits, low + (high - low) * draws[:, 1], largest)
    area = library.where(fits, area, -abs(wide - largest))
    size = library.exp(library.stack([area + aspect - wide, area - aspect + wide], 1) / 2).clip(max=1)
    corner = library.where(fits[:, None], draws[:, 2:], 0.5) * (1 - size)
    return library.concatenate([corner, corner + size], 1)  # type: ignore[no-any-return]


class Box(NamedTuple):
    """Pixels `left` … `right`-1 and `top` … `bottom`-1 of an image."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def width(self) -> int:
        """In pixels."""
        return self.right - self.left

    @property
    def height(self) -> int:
        """In pixels."""
        return self.bottom - self.top


def random_crop(width: int, height: int, smallest: float, key: int) -> Box:
    """The crop that a key gives for an image of that size, rounded to pixels."""
    draws = uniforms(np.array([key], np.uint64), 4)
    left, top, right, bottom = crop_boxes(draws, smallest, width / height)[0].tolist()
    (x0, x1), (y0, y1) = _to_pixels(left, right, width), _to_pixels(top, bottom, height)
    return Box(x0, y0, x1, y1)


def _to_pixels(start: float, end: float, pixels: int) -> tuple[int, int]:
    """A range of shares, rounded to at least one pixel."""
    first = min(round(start * pixels), pixels - 1)
    return first, max(round(end * pixels), first + 1)
