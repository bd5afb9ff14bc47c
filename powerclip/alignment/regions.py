"""Regions of a batch of images: random boxes on the patch grid (§3.2) and their embeddings (Eqs. 1 and 2).

Axes: C images · M regions · N patches · D width
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from powerclip.ranks import ALONE, Ranks


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


def embed_regions(
    patches: Tensor, masks: Tensor, centre: Literal["none", "batch", "image"] = "none", ranks: Ranks = ALONE
) -> Tensor:
    """Eq. 2: φ(I | R_m) [C, M, D], the normalised sum of the patch features [C, N, D] under each mask [C, M, N].

    `centre` says which mean is subtracted from every patch: none, that of the batch on all `ranks`, or its own image's.
    """
    if centre == "none":
        return normalise(masked_sums(patches, masks))
    # One more row covers the image: its mean costs no pass over the patches, neither here nor in the backward.
    rows = torch.cat([masks, torch.ones_like(masks[:, :1])], 1)
    sums, total = masked_sums(patches, rows).split([masks.shape[1], 1], 1)
    mean = total / patches.shape[1]  # [C, 1, D]
    if centre == "batch":
        mean = ranks.mean(mean.mean(0, keepdim=True))
    return normalise(subtract(sums, masks, mean))


def masked_sums(values: Tensor, masks: Tensor, there: Tensor | None = None) -> Tensor:
    """Sums [C, M, D] of values [C, N, D] under masks [C, M, N], in float32 whatever the towers compute in.

    Values that are not `there` [C, N] may be anything, NaN too; no mask may cover them.
    """
    return _MaskedSums.apply(values, masks, there)


def subtract(sums: Tensor, masks: Tensor, centre: Tensor) -> Tensor:
    """The sums [C, M, D] of what lies under masks [C, M, N], with a `centre` [… 1, D] taken from each summand."""
    # Sums are linear: it is subtracted from M sums, not from N summands.
    return torch.addcmul(sums, masks.sum(-1, keepdim=True, dtype=sums.dtype), centre, value=-1)


def normalise(vectors: Tensor) -> Tensor:
    """Vectors […, D] of length 1."""
    return _Normalise.apply(vectors)


class _MaskedSums(torch.autograd.Function):
    """One matrix product each way. With bf16 values on a GPU there is no float32 copy of them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, masks: Tensor, there: Tensor | None) -> Tensor:
        ctx.dtype = values.dtype
        ctx.half = values.is_cuda and values.dtype == torch.bfloat16
        masks = _aligned(masks, values.dtype if ctx.half else torch.float32)
        ctx.save_for_backward(masks)
        if there is not None:
            # Selected, never multiplied by zero: 0 · NaN is NaN.
            values = torch.where(there.unsqueeze(-1), values, 0)
        if ctx.half:
            return torch.bmm(masks, values, out_dtype=torch.float32)
        return masks @ values.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (masks,) = ctx.saved_tensors
        return (masks.mT @ gradients[0].to(masks.dtype)).to(ctx.dtype), None, None


def _aligned(masks: Tensor, dtype: torch.dtype) -> Tensor:
    """Masks [C, M, N] as numbers whose rows begin at multiples of 16 bytes: cuBLAS takes twice as long over others."""
    count = masks.shape[-1]
    rows = torch.zeros(*masks.shape[:-1], -(-count // 8) * 8, dtype=dtype, device=masks.device)[..., :count]
    return rows.copy_(masks)


class _Normalise(torch.autograd.Function):
    """What F.normalize computes; its backward reads and writes all vectors ten times, this one four times."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1e-12)
        unit = vectors / length
        ctx.save_for_backward(unit, length)
        return unit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        unit, length = ctx.saved_tensors
        along = (gradients[0] * unit).sum(-1, keepdim=True)
        return torch.addcmul(gradients[0], unit, along, value=-1) / length


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
