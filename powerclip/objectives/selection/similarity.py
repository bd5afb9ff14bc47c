"""How alike the patches of an image are, by their pixels and by their embeddings.

Axes: C images · N patches · D width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def split_patches(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """The pixels of each patch [C, N, 3·h·w] of images [C, 3, H, W]; patch (r, c) has index r · columns + c."""
    rows, columns = grid
    count, channels, height, width = images.shape
    h, w = height // rows, width // columns
    cells = images.reshape(count, channels, rows, h, columns, w)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(count, rows * columns, channels * h * w)


def pixel_similarity(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cosines [C, N, N] between patches whose pixels have mean 0 and deviation 1 within each patch."""
    pixels = split_patches(images.float(), grid)
    variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
    return _cosines((pixels - mean) / (variance + 1e-6).sqrt())


def embedding_similarity(patches: Tensor) -> Tensor:
    """Cosines [C, N, N] between embedded patches [C, N, D]."""
    return _cosines(patches.float())


def _cosines(vectors: Tensor) -> Tensor:
    # In float32 wherever it is called: bf16 would tie patches that a threshold has to tell apart.
    with torch.autocast(vectors.device.type, enabled=False):
        unit = F.normalize(vectors, dim=-1)
        return unit @ unit.transpose(1, 2)
