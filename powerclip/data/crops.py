"""Which part of an image a sample shows: RandomResizedCrop's rule, as a function of a key."""

from __future__ import annotations

import math
from typing import NamedTuple

from powerclip.data.keyed_random import uniform

_RATIO = 4 / 3  # widest and tallest crop, as torchvision's default
_ATTEMPTS = 10


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
    """A box inside an image of that size, of a random area, shape and place.

    The area is uniform between `smallest` and 1 of the image's, the logarithm of the aspect ratio uniform up to 4/3
    either way. As torchvision's RandomResizedCrop: of ten boxes the first that fits; else the largest in the middle
    whose ratio is allowed.
    """
    widest = math.log(_RATIO)
    for attempt in range(_ATTEMPTS):
        area, shape, x, y = (uniform(key, 4 * attempt + draw) for draw in range(4))
        pixels = (smallest + (1 - smallest) * area) * width * height
        ratio = math.exp((2 * shape - 1) * widest)
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return Box(left, top, left + w, top + h)
    w, h = width, height
    if width > height * _RATIO:
        w = round(height * _RATIO)
    elif height > width * _RATIO:
        h = round(width * _RATIO)
    left, top = (width - w) // 2, (height - h) // 2
    return Box(left, top, left + w, top + h)
