"""What every segmenter is: images in, masks on the sidecars' grid out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from powerclip.data.mask_codec import GRID
from powerclip.errors import UserError

Masks = npt.NDArray[np.bool_]  # [masks, GRID, GRID]


@dataclass(frozen=True)
class SegmenterImage:
    """An image to segment."""

    key: str
    pixels: npt.NDArray[np.uint8]  # [H, W, 3]


class Segmenter(Protocol):
    """Finds the regions of images."""

    name: str  # as `load_segmenter` knows it
    version: str  # changes whenever the same image may get other masks
    options: dict[str, Any]  # what else decides about the masks: thresholds, weights

    def segment(self, images: Sequence[SegmenterImage]) -> list[Masks]:
        """The masks [masks, GRID, GRID] of each image, the most certain or the largest first."""
        ...


@runtime_checkable
class AsynchronousSegmenter(Segmenter, Protocol):
    """A segmenter that computes while its caller goes on."""

    def submit(self, images: Sequence[SegmenterImage]) -> Callable[[], list[Masks]]:
        """Start to segment images; what is returned waits for their masks."""
        ...


def no_masks() -> Masks:
    """An image without regions."""
    return np.zeros((0, GRID, GRID), np.bool_)


def file_identity(path: Path) -> str:
    """A few digits of a file's SHA-256, which tell one set of weights from another."""
    try:
        with open(path, "rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except FileNotFoundError:
        raise UserError(f"no weights file {path}") from None
