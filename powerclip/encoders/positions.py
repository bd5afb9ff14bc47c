"""Position embeddings for images of another size than a tower was trained on: its own, interpolated.

open_clip does this once when it loads weights, timm whenever it reads an image; both resample the grid of embeddings as
an image, bicubic and antialiased, and leave the class token's as it is. This is timm's function.
"""

from __future__ import annotations

from torch import Tensor


def interpolate_positions(positions: Tensor, grid: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """Embeddings [1+N, D] of a class token and a grid of N patches, for a grid of `wanted` rows and columns.

    For the grid that they are for, they are returned as they are.
    """
    if grid == wanted:
        return positions
    from timm.layers.pos_embed import resample_abs_pos_embed

    return resample_abs_pos_embed(positions[None], list(wanted), list(grid), num_prefix_tokens=1)[0]
