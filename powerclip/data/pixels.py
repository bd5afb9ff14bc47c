"""Pixels as an image tower reads them: bytes resized and normalised, on the device where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# CLIP's own: what open_clip normalises with unless a model says otherwise.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Normaliser:
    """Turns values 0 … 255 [..., 3, H, W] into what a tower was trained on, (x/255 - mean) / std, in place."""

    def __init__(
        self,
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
        device: torch.device | str = "cpu",
    ):
        # One multiplication and one addition on the bytes.
        self._scale = torch.tensor([1 / (255 * s) for s in std], device=device).view(3, 1, 1)
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).view(3, 1, 1)

    def __call__(self, values: Tensor) -> Tensor:
        """The values, normalised where they are."""
        return values.mul_(self._scale).add_(self._shift)


def squash(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Whole images [C, 3, H, W] at another size, without regard to their shape: values 0 … 255, float."""
    resized = F.interpolate(images.float(), size, mode="bicubic", antialias=True, align_corners=False)
    return resized.clamp_(0, 255)  # bicubic overshoots at edges
