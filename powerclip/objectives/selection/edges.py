"""Edges of an image at the size of its patch grid.

Axes: C images · N patches
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.objectives.selection.similarity import split_patches


def edge_strength(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sobel's gradient of the patch means, from 0 to 1 in each image [C, N]; 0 everywhere in an image without edges."""
    means = split_patches(images.float(), grid).mean(dim=-1).unflatten(1, grid)
    # The border is continued: zeros around the image would make an edge of it.
    m = F.pad(means.unsqueeze(1), (1, 1, 1, 1), mode="replicate").squeeze(1)
    rows = m[:, :-2] + 2 * m[:, 1:-1] + m[:, 2:]
    columns = m[:, :, :-2] + 2 * m[:, :, 1:-1] + m[:, :, 2:]
    strength = torch.hypot(rows[:, :, 2:] - rows[:, :, :-2], columns[:, 2:] - columns[:, :-2]).flatten(1)
    low, high = strength.amin(dim=1, keepdim=True), strength.amax(dim=1, keepdim=True)
    return (strength - low) / (high - low + 1e-6)
