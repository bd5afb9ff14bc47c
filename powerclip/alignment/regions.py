"""Regions of a batch of images: random boxes on the patch grid (§3.2) and their embeddings (Eqs. 1 and 2).

Axes: C images · M regions · N patches · D width
"""

from __future__ import annotations

from typing import Any

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
    draws = [torch.rand(count, regions, generator=generator, device=device) for _ in range(4)]
    return boxes_of(torch.stack(draws), grid, largest)


def boxes_of(draws: Tensor, grid: tuple[int, int], largest: float = 1.0) -> Tensor:
    """The boxes [C, M, N] that `random_boxes` makes of numbers in [0, 1) [4, C, M]: centre, height, centre, width."""

    def spans(centre: Tensor, length: Tensor, cells: int) -> Tensor:
        centre, half = centre.unsqueeze(-1) * cells, length.unsqueeze(-1) * cells * largest / 2
        cell = torch.arange(cells, device=draws.device)
        # A cell belongs to the box when its middle does; the cell under the centre always does.
        inside = (cell + 0.5 - centre).abs() <= half
        return inside | (cell == centre.floor().clamp(max=cells - 1))  # [C, M, cells]

    rows, columns = spans(draws[0], draws[1], grid[0]), spans(draws[2], draws[3], grid[1])
    return (rows.unsqueeze(-1) & columns.unsqueeze(-2)).flatten(2)


def embed_regions(patches: Tensor, masks: Tensor, centre: Tensor | None = None) -> Tensor:
    """Eq. 2: φ(I | R_m) [C, M, D], the normalised sum of the patch features under each mask.

    With a `centre` (any shape that [C, 1, D] can take), it is what is subtracted from every patch; the sum is linear,
    so that it is subtracted from the M sums instead of the N patches.
    """
    # Similarities that carry a gradient are float32, whatever the towers compute in.
    if patches.is_cuda and patches.dtype == torch.bfloat16:
        sums = _HalfSums.apply(patches, masks)
    else:
        sums = masks.float() @ patches.float()
    if centre is not None:
        sums = sums - masks.sum(-1, keepdim=True) * centre
    return F.normalize(sums, dim=-1)


class _HalfSums(torch.autograd.Function):
    """Sums of bf16 patches under masks in float32, without a float32 copy of the patches."""

    @staticmethod
    def forward(ctx: Any, patches: Tensor, masks: Tensor) -> Tensor:
        ctx.save_for_backward(masks)
        return torch.bmm(masks.to(patches.dtype), patches, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (masks,) = ctx.saved_tensors
        return masks.bfloat16().mT @ gradients[0].bfloat16(), None


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
