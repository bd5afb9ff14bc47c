"""Two crops of each image, made on its own device, and the smallest crop that covers both.

A crop is x0, y0, x1, y1 in units of the image [C, 4].

Axes: C images
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ASPECT = math.log(4 / 3)  # crops are at most this much wider than high, or higher than wide


def shape_crops(noise: Tensor, smallest: float) -> Tensor:
    """The crops [C, 4] of uniform numbers [C, 4]: area from `smallest` to 1, the shape's logarithm, then the place."""
    area, shape, left, top = noise.unbind(dim=1)
    area = smallest + (1 - smallest) * area
    # Both sides are at most 1 when the aspect lies between the area and its inverse: nothing has to be drawn again.
    reach = (-area.log()).clamp(max=ASPECT)
    aspect = ((2 * shape - 1) * reach).exp()
    width, height = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    x, y = left * (1 - width), top * (1 - height)
    return torch.stack([x, y, x + width, y + height], dim=1)


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
