"""From the bytes of an image's file to the pixels that a segmenter sees: all of the image, in eight bits and RGB.

As in training, an orientation in EXIF is not applied: masks belong to the pixels as they lie in the file.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image

LONGEST = 1024  # pixels of a side that any segmenter makes use of
MOST_PIXELS = 1024 * 1024 * 1024 // 4 // 3  # beyond, a file is a bomb rather than an image


def decode_rgb(data: bytes, longest: int = LONGEST) -> npt.NDArray[np.uint8] | None:
    """An image [H, W, 3] whose sides have at most `longest` pixels; None when the file is not readable."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            width, height = picture.size
            if width * height > MOST_PIXELS:
                return None
            scale = min(1.0, longest / max(width, height))
            size = max(1, round(width * scale)), max(1, round(height * scale))
            picture.draft("RGB", size)  # a large JPEG is decoded at a half, a quarter or an eighth
            image = _eight_bits(picture)
            return np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))
    except Exception:  # a broken file makes Pillow's readers raise almost anything
        return None


def _eight_bits(picture: Image.Image) -> Image.Image:
    from PIL import Image

    if picture.mode.startswith("I") or picture.mode == "F":
        values = np.asarray(picture).astype(np.float32) / (1 if picture.mode == "F" else 257)
        picture = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    elif "transparency" in picture.info:  # of a palette: Pillow wants it named before it is dropped
        picture = picture.convert("RGBA")
    return picture.convert("RGB")
