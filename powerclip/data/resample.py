"""Crops of images by products of matrices: a crop of a whole batch in two, which a GPU does faster than it gathers.

Bicubic interpolation is separable. What a row of the crop takes of each row of the image is a row of one matrix, what
a column takes of each column a row of another; a crop is the image between the two.

Axes: C images · H, W height and width
"""

from __future__ import annotations

import torch
from torch import Tensor

_A = -0.75  # of the cubic, as torch's own bicubic modes have it


def crop_batch(images: Tensor, crops: Tensor, size: tuple[int, int]) -> Tensor:
    """Crops [C, 3, *size] of images [C, 3, H, W], values 0 … 255, interpolated as `grid_sample` does in bicubic mode.

    Beyond the border an image goes on as its border.

    Args:
        images: bytes or floats.
        crops: centre x and y, half width and height [C, 4], the image being [-1, 1]².
        size: height and width of the crops.
    """
    height, width = images.shape[2:]
    rows = cubic_weights(crops[:, 1], crops[:, 3], size[0], height)
    columns = cubic_weights(crops[:, 0], crops[:, 2], size[1], width)
    by_row = images.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)  # [C, H, 3, W]
    down = (rows @ by_row.flatten(2)).unflatten(2, (3, width))
    pixels = (down.flatten(1, 2) @ columns.mT).unflatten(1, (size[0], 3))  # [C, height, 3, width]
    return pixels.clamp_(0, 255).transpose(1, 2).contiguous()  # a cubic overshoots at edges


def cubic_weights(centre: Tensor, half: Tensor, cells: int, pixels: int) -> Tensor:
    """How much of each of an image's `pixels` in a line every one of a crop's `cells` takes: [C, cells, pixels].

    The crops lie inside the image, `half` [C] to either side of `centre` [C], the image being [-1, 1].
    """
    middle = (torch.arange(cells, device=centre.device) + 0.5) * (2 / cells) - 1
    at = ((centre[:, None] + half[:, None] * middle + 1) * pixels - 1) / 2  # in pixels, [C, cells]
    before = at.floor()
    past = at - before
    taps = torch.stack([_far(past + 1), _near(past), _near(1 - past), _far(2 - past)], -1)
    # Two more pixels at either end, for what reaches beyond; it is the border's.
    place = (before.long() + 1).unsqueeze(-1) + torch.arange(4, device=centre.device)
    weights = taps.new_zeros(*at.shape, pixels + 4).scatter_(2, place.clamp_(0, pixels + 3), taps)
    inside = weights[..., 2:-2]
    inside[..., 0] += weights[..., :2].sum(-1)
    inside[..., -1] += weights[..., -2:].sum(-1)
    return inside


def _near(distance: Tensor) -> Tensor:
    """What a pixel less than one away counts."""
    return ((_A + 2) * distance - (_A + 3)) * distance * distance + 1


def _far(distance: Tensor) -> Tensor:
    """What a pixel one to two away counts."""
    return (((distance - 5) * distance + 8) * distance - 4) * _A
