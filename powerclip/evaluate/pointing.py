"""The pointing game: does the strongest patch of a phrase's heatmap lie in the box that the phrase names?

A box is (x0, y0, x1, y1) in shares of the image. A patch is a point, its centre: the maximum of the
bilinearly enlarged heatmap lies there too, so nothing is enlarged. Axes: T phrases.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cells_in_boxes(boxes: Tensor, grid: tuple[int, int]) -> Tensor:
    """Which patches of the grid have their centre in each box [T, 4]: [T, rows, columns] bool."""
    rows, columns = grid
    y = (torch.arange(rows, device=boxes.device, dtype=boxes.dtype) + 0.5) / rows
    x = (torch.arange(columns, device=boxes.device, dtype=boxes.dtype) + 0.5) / columns
    x0, y0, x1, y1 = (side[:, None] for side in boxes.unbind(1))
    inside_y = (y >= y0) & (y <= y1)
    inside_x = (x >= x0) & (x <= x1)
    return inside_y[:, :, None] & inside_x[:, None, :]


def hits_cells(heatmaps: Tensor, inside: Tensor) -> Tensor:
    """Whether the maximum of each heatmap [T, rows, columns] is one of its patches `inside`: [T] bool.

    When several patches share the maximum, all must be; so a constant heatmap points nowhere. A heatmap with NaN is a
    miss.
    """
    highest = heatmaps.flatten(1).amax(1)
    top = heatmaps == highest[:, None, None]
    return ~(top & ~inside).flatten(1).any(1) & highest.isfinite()
