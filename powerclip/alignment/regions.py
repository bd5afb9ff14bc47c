"""Regions of a batch of images: random boxes on the patch grid (§3.2) and their embeddings (Eqs. 1 and 2).

Axes: C images · M regions · N patches · D width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def random_boxes(
    count: int,
    regions: int,
    grid: tuple[int, int],
    generator: torch.Generator | None = None,
    largest: float = 1.0,
) -> Tensor:
    """Masks [C, M, N] of random boxes: centre, height and width uniform on the grid, clipped to it, never empty.

    `largest` is the longest side as a share of the grid's.
    """
    device = generator.device if generator is not None else "cpu"

    def spans(cells: int) -> Tensor:
        centre = torch.rand(count, regions, 1, generator=generator, device=device) * cells
        half = torch.rand(count, regions, 1, generator=generator, device=device) * cells * largest / 2
        cell = torch.arange(cells, device=device)
        # A cell belongs to the box when its middle does; the cell under the centre always does.
        inside = (cell + 0.5 - centre).abs() <= half
        return inside | (cell == centre.floor().clamp(max=cells - 1))  # [C, M, cells]

    rows, columns = spans(grid[0]), spans(grid[1])
    return (rows.unsqueeze(-1) & columns.unsqueeze(-2)).flatten(2)


def embed_regions(patches: Tensor, masks: Tensor) -> Tensor:
    """Eq. 2: φ(I | R_m) [C, M, D], the normalised sum of the patch features under each mask."""
    # Similarities that carry a gradient are float32, whatever the towers compute in.
    patches = patches.float()
    return F.normalize(masks.to(patches.dtype) @ patches, dim=-1)


# 2^16 sets are 65,536 similarities for each node and image; the next region doubles that.
MOST_ENUMERATED = 16


def subset_matrix(regions: int, *, empty: bool = True, device: torch.device | str = "cpu") -> Tensor:
    """All subsets of M regions as rows of zeros and ones [2^M, M]; without the first, empty one if so asked."""
    if regions > MOST_ENUMERATED:
        raise ValueError(f"{regions} regions have 2^{regions} sets: at most {MOST_ENUMERATED} can be enumerated")
    bits = torch.arange(0 if empty else 1, 2**regions, device=device)
    return (bits.unsqueeze(-1) >> torch.arange(regions, device=device)) & 1


def embed_region_sets(regions: Tensor, *, empty: bool = True) -> Tensor:
    """Eq. 1: r_A [C, 2^M, D] for every set A of regions, the sum of its members' embeddings."""
    subsets = subset_matrix(regions.shape[1], empty=empty, device=regions.device)
    return subsets.to(regions.dtype) @ regions
