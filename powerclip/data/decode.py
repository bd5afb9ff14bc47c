"""From the bytes of an image's file to its pixels: a crop (shards), the whole (segmenters), a square (a corpus).

For a crop no more is done than it needs: only the header is read before it is chosen, and a JPEG is then decoded at
1/2, 1/4 or 1/8 of its size when the crop still has the pixels that are asked for. Torch resizes bytes two to four times
as fast as Pillow, with the same filter.

Images are taken as they lie in the file: an orientation in EXIF is not applied (open_clip does not either, and masks
are stored in the same coordinates). Transparency is dropped, as open_clip does.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.data.crops import random_crop
from powerclip.data.faults import BadSample, Fault

if TYPE_CHECKING:
    from PIL import Image

# What Pillow itself warns of: 89 million pixels, a quarter of a gigabyte decoded.
MOST_PIXELS = 1024 * 1024 * 1024 // 4 // 3
# What a web crawl calls .jpg, .png or .webp. Fewer formats to try make opening quicker.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True)
class Crop:
    """What a sample shows of its image."""

    pixels: Tensor  # [H, W, 3] uint8
    box: tuple[float, float, float, float]  # left, top, right, bottom as shares of the whole image
    faults: list[Fault]  # why it had to be converted


def decode_crop(data: bytes, size: tuple[int, int], smallest: float, key: int) -> Crop:
    """A random crop of an image, `size` pixels high and wide; `random_crop` says which.

    Raises:
        BadSample: the file is truncated, unreadable, or holds too many pixels.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise BadSample(Fault.TOO_LARGE, f"an image of {width:,} × {height:,} pixels")
            box = random_crop(width, height, smallest, key)
            # Rounded up, so that the crop of a smaller image still has all the pixels that are asked for.
            drafted = image.draft(None, (-(-width * size[1] // box.width), -(-height * size[0] // box.height)))
            shrunk = round(width / drafted[1][2]) if drafted else 1
            left, top = box.left // shrunk, box.top // shrunk
            right, bottom = -(-box.right // shrunk), -(-box.bottom // shrunk)
            faults = _conversions(image)
            # Cut before it is converted and copied.
            pixels = torch.from_numpy(np.array(to_rgb(image.crop((left, top, right, bottom)))))
    except BadSample:
        raise
    except Image.DecompressionBombError as error:
        raise BadSample(Fault.TOO_LARGE, str(error)) from None
    except Exception as error:  # a broken file makes readers raise almost anything
        kind = Fault.TRUNCATED if "truncated" in str(error) else Fault.UNREADABLE
        raise BadSample(kind, str(error) or type(error).__name__) from None
    # The box as it was cut, in whole pixels of the image as decoded: masks are cropped by it.
    shares = (
        left * shrunk / width,
        top * shrunk / height,
        min(right * shrunk / width, 1.0),
        min(bottom * shrunk / height, 1.0),
    )
    return Crop(_resize(pixels, size), shares, faults)


def storable_image(data: bytes) -> tuple[bytes, str]:
    """An image's file as it is put into a tar, with its suffix there: as it is, or as PNG in formats that tars lack.

    Raises:
        BadSample: the file is truncated, unreadable, or holds too many pixels.
    """
    from PIL import Image

    kept = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise BadSample(Fault.TOO_LARGE, f"an image of {width:,} × {height:,} pixels")
            image.draft(None, (width // 8, height // 8))  # the whole file is read, an eighth of it computed
            image.load()
            if image.format in kept:
                return data, kept[image.format]
            file = io.BytesIO()
            to_rgb(image).save(file, "png")
            return file.getvalue(), "png"
    except BadSample:
        raise
    except Exception as error:  # a broken file makes readers raise almost anything
        kind = Fault.TRUNCATED if "truncated" in str(error) else Fault.UNREADABLE
        raise BadSample(kind, str(error) or type(error).__name__) from None


def decode_rgb(data: bytes, longest: int = 1024) -> npt.NDArray[np.uint8] | None:
    """A whole image [H, W, 3] whose sides have at most `longest` pixels; None when the file is not readable."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                return None
            scale = min(1.0, longest / max(width, height))
            size = max(1, round(width * scale)), max(1, round(height * scale))
            image.draft("RGB", size)  # a large JPEG is decoded at a half, a quarter or an eighth
            rgb = to_rgb(image)
            return np.asarray(rgb if rgb.size == size else rgb.resize(size, Image.Resampling.BICUBIC))
    except Exception:  # a broken file makes readers raise almost anything
        return None


def decode_squashed(data: bytes, size: int) -> Tensor | None:
    """A whole image as bytes [3, size, size], whatever its shape; None when the file is not readable."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            rgb = to_rgb(image)
            if rgb.size != (size, size):
                rgb = rgb.resize((size, size), Image.Resampling.BICUBIC)
            return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()
    except Exception:  # a broken file makes readers raise almost anything
        return None


def to_rgb(image: Image.Image) -> Image.Image:
    """An image's first frame as RGB, eight bits each: 16 bits are scaled, transparency is dropped."""
    from PIL import Image

    if _is_deep(image):
        values = np.asarray(image).astype(np.float32)
        if image.mode != "F":
            values /= 257  # 65,535 to 255
        image = Image.fromarray(values.clip(0, 255).round().astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:  # Pillow wants it named before it is dropped
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _is_deep(image: Image.Image) -> bool:
    return image.mode.startswith("I") or image.mode == "F"


def _conversions(image: Image.Image) -> list[Fault]:
    """The conversions to RGB that are counted as faults."""
    faults = []
    # Cameras store a preview as a second frame (MPO); that does not move.
    if getattr(image, "is_animated", False) and image.format != "MPO":
        faults.append(Fault.ANIMATED)
    if image.mode == "CMYK":
        faults.append(Fault.CMYK)
    elif _is_deep(image):
        faults.append(Fault.DEEP)
    return faults


def _resize(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """An image [height, width, 3] at another size."""
    if pixels.shape[:2] == size:
        return pixels
    batch = pixels.permute(2, 0, 1).unsqueeze(0)
    resized = F.interpolate(batch, size, mode="bicubic", antialias=True, align_corners=False)
    return resized[0].permute(1, 2, 0)
