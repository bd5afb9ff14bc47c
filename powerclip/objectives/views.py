"""Crops of images, made on their own device, and the smallest crop that covers two.

A crop is x0, y0, x1, y1 in units of the image [C, 4], as `powerclip.data.crops` draws it.

Axes: C images
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cover(one: Tensor, other: Tensor) -> Tensor:
    """The smallest crops [C, 4] that hold two others."""
    return torch.cat([torch.minimum(one[:, :2], other[:, :2]), torch.maximum(one[:, 2:], other[:, 2:])], dim=1)


def take_crops(images: Tensor, crops: Tensor) -> Tensor:
    """The crops [C, 4] of images [C, 3, H, W], resized to their size, bilinear."""
    x0, y0, x1, y1 = crops.unbind(dim=1)
    zero = torch.zeros_like(x0)
    # From −1 … 1 in the crop to −1 … 1 in the image.
    across = torch.stack([x1 - x0, zero, x0 + x1 - 1], dim=1)
    down = torch.stack([zero, y1 - y0, y0 + y1 - 1], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
