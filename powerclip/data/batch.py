"""What one training step sees: pictures, captions, and the parts of both that are to be aligned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.alignment.phrases import Phrases


@dataclass
class Batch:
    """C pairs of a picture and a caption, with M regions of each picture and the tree of each caption."""

    images: Tensor  # [C, 3, H, W] float, normalised for the image tower
    tokens: Tensor  # [C, L] long
    regions: Tensor  # [C, M, N] bool
    phrases: Phrases
    keys: list[str]

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return Batch(
            images=self.images.to(device, non_blocking=non_blocking),
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            regions=self.regions.to(device, non_blocking=non_blocking),
            phrases=self.phrases.to(device, non_blocking=non_blocking),
            keys=self.keys,
        )
