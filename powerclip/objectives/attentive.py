"""Attentive masking: the cells that the class token looks at most stay.

Axes: C images · N patches · n patches that stay
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def resample_scores(scores: Tensor, grid: tuple[int, int], seen: Tensor, wanted: Tensor) -> Tensor:
    """Scores [C, N] of the patches of one crop at the patches of another, bilinear.

    `seen` [C, 4] is the crop that the scores belong to and `wanted` [C, 4] the other: x0, y0, x1, y1 in one frame.
    """
    rows, columns = grid
    size = seen[:, 2:] - seen[:, :2]
    start, end = (wanted[:, :2] - seen[:, :2]) / size, (wanted[:, 2:] - seen[:, :2]) / size  # [C, 2], 0 to 1 in `seen`
    x, y = ((torch.arange(n, device=scores.device, dtype=torch.float32) + 0.5) / n for n in (columns, rows))
    x = start[:, :1] + x * (end - start)[:, :1]
    y = start[:, 1:] + y * (end - start)[:, 1:]
    at = torch.stack([x.unsqueeze(1).expand(-1, rows, -1), y.unsqueeze(2).expand(-1, -1, columns)], dim=-1) * 2 - 1
    image = scores.float().unflatten(1, grid).unsqueeze(1)
    return F.grid_sample(image, at, mode="bilinear", padding_mode="border", align_corners=False).flatten(1)


def kept_cells(grid: tuple[int, int], keep: float, cell: int) -> int:
    """How many cells of `cell` × `cell` patches a share is, rounded up: half of 7 × 7 are 25."""
    return max(1, math.ceil((grid[0] // cell) * (grid[1] // cell) * keep - 1e-6))


def select_attentive(scores: Tensor, grid: tuple[int, int], keep: float = 0.5, cell: int = 2) -> Tensor:
    """Indices [C, n] of the patches of the best cells, for patch scores [C, N]; the grid divides into whole cells."""
    cells = F.avg_pool2d(scores.float().unflatten(1, grid).unsqueeze(1), cell).flatten(1)
    best = cells.topk(kept_cells(grid, keep, cell), dim=1).indices
    row, column = best // (grid[1] // cell) * cell, best % (grid[1] // cell) * cell
    corner = row * grid[1] + column  # [C, cells]
    step = torch.arange(cell, device=scores.device)
    inside = (step.unsqueeze(1) * grid[1] + step).flatten()
    return (corner.unsqueeze(-1) + inside).flatten(1).sort(dim=1).values
