"""Images as tensors on their device: cropped and normalised for the image tower.

A crop of a whole batch is two products of matrices, which a GPU does faster than it gathers: bicubic interpolation is
separable. What a row of the crop takes of each row of the image is a row of one matrix, what a column takes of each
column a row of another; the crop is the image between the two.

Axes: C images · H, W height and width
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# CLIP's own: what open_clip normalises with unless a model says otherwise.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_A = -0.75  # of the cubic, as torch's own bicubic modes have it


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


def crop_batch(images: Tensor, crops: Tensor, size: tuple[int, int]) -> Tensor:
    """Crops [C, 3, *size] of images [C, 3, H, W], values 0 … 255, interpolated as `grid_sample` does in bicubic mode.

    Beyond the border an image goes on as its border.

    Args:
        images: bytes or floats.
        crops: left, top, right, bottom as shares of the image [C, 4], see `powerclip.data.crops`.
        size: height and width of the crops.
    """
    height, width = images.shape[2:]
    rows = cubic_weights(crops[:, 1], crops[:, 3], size[0], height)
    columns = cubic_weights(crops[:, 0], crops[:, 2], size[1], width)
    by_row = images.transpose(1, 2).to(torch.float32, memory_format=torch.contiguous_format)  # [C, H, 3, W]
    down = (rows @ by_row.flatten(2)).unflatten(2, (3, width))
    pixels = (down.flatten(1, 2) @ columns.mT).unflatten(1, (size[0], 3))  # [C, height, 3, width]
    return pixels.clamp_(0, 255).transpose(1, 2).contiguous()  # a cubic overshoots at edges


def cubic_weights(start: Tensor, end: Tensor, cells: int, pixels: int) -> Tensor:
    """How much of each of an image's `pixels` in a line every one of a crop's `cells` takes: [C, cells, pixels], float.

    The crops lie inside the image, from `start` to `end` [C], the image being [0, 1].
    """
    middle = (torch.arange(cells, device=start.device) + 0.5) / cells
    at = (start[:, None] + (end - start)[:, None] * middle) * pixels - 0.5  # in pixels, [C, cells]
    before = at.floor()
    past = (at - before).float()
    taps = torch.stack([_far(past + 1), _near(past), _near(1 - past), _far(2 - past)], -1)
    # Two more pixels at either end, for what reaches beyond; it is the border's.
    position = (before.long() + 1).unsqueeze(-1) + torch.arange(4, device=start.device)
    weights = taps.new_zeros(*at.shape, pixels + 4).scatter_(2, position.clamp_(0, pixels + 3), taps)
    inside = weights[..., 2:-2]
    inside[..., 0] += weights[..., :2].sum(-1)
    inside[..., -1] += weights[..., -2:].sum(-1)
    return inside


def _near(distance: Tensor) -> Tensor:
    """The cubic's weight of a pixel less than one away."""
    return ((_A + 2) * distance - (_A + 3)) * distance * distance + 1


def _far(distance: Tensor) -> Tensor:
    """The cubic's weight of a pixel one to two away."""
    return (((distance - 5) * distance + 8) * distance - 4) * _A
