"""Regions of a batch of images: random boxes on the patch grid (§3.2) or partitions, and their embeddings (Eqs. 1, 2).

Axes: C images · M regions · N patches · D width
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from powerclip.alignment.config import Centre
from powerclip.alignment.pooling import masked_sums, normalise, subtract
from powerclip.runtime.distributed import SINGLE, Ranks


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
    return boxes_of(draw_boxes(count, regions, generator), grid, largest)


def draw_boxes(count: int, regions: int, generator: torch.Generator | None = None) -> Tensor:
    """The numbers in [0, 1) [4, C, M] that `random_boxes` draws: centre, height, centre, width."""
    device = generator.device if generator is not None else "cpu"
    return torch.stack([torch.rand(count, regions, generator=generator, device=device) for _ in range(4)])


def boxes_of(draws: Tensor, grid: tuple[int, int], largest: float = 1.0) -> Tensor:
    """The boxes [C, M, N] that `random_boxes` makes of the numbers it draws."""

    def spans(centre: Tensor, length: Tensor, cells: int) -> Tensor:
        centre, half = centre.unsqueeze(-1) * cells, length.unsqueeze(-1) * cells * largest / 2
        cell = torch.arange(cells, device=draws.device)
        # A cell belongs to the box when its middle does; the cell under the centre always does.
        inside = (cell + 0.5 - centre).abs() <= half
        return inside | (cell == centre.floor().clamp(max=cells - 1))  # [C, M, cells]

    rows, columns = spans(draws[0], draws[1], grid[0]), spans(draws[2], draws[3], grid[1])
    return (rows.unsqueeze(-1) & columns.unsqueeze(-2)).flatten(2)


# random: boxes that may overlap and leave gaps; partition: boxes that cover the image once.
DrawnRegions = Literal["random", "partition"]


def regions_of(draws: Tensor, grid: tuple[int, int], kind: DrawnRegions = "random", largest: float = 1.0) -> Tensor:
    """The regions [C, M, N] of a kind that uniform numbers [4, C, M] make, as `draw_boxes` draws them."""
    return partition_of(draws, grid) if kind == "partition" else boxes_of(draws, grid, largest)


def partition_of(draws: Tensor, grid: tuple[int, int]) -> Tensor:
    """M boxes [C, M, N] that cover the image once, from uniform numbers [4, C, M]: M - 1 random cuts.

    A cut goes through one of the boxes so far, along a line of the grid. All edges between two patches of a box are
    equally likely to lie on it, so large boxes are cut first. With more regions than patches, some are the same patch.
    """
    _, count, regions = draws.shape
    rows, columns = grid
    image = torch.arange(count, device=draws.device)
    # First and last row, first and last column, one past the end: [4, C, M]. Boxes that are still to come are empty.
    edges = torch.zeros(4, count, regions, dtype=torch.long, device=draws.device)
    edges[1, :, 0], edges[3, :, 0] = rows, columns
    for new in range(1, regions):
        height, width = edges[1, :, :new] - edges[0, :, :new], edges[3, :, :new] - edges[2, :, :new]
        by_row, by_column = (height - 1) * width, (width - 1) * height  # places, each as long as the cut
        places = (by_row + by_column).cumsum(1)
        cut = torch.searchsorted(places.float(), draws[0, :, new, None] * places[:, -1:], right=True)
        cut = cut.clamp(max=new - 1)[:, 0]
        own_rows, own_columns = by_row[image, cut], by_column[image, cut]
        is_row = draws[1, :, new] * (own_rows + own_columns) < own_rows
        old = edges[:, image, cut]  # [4, C]
        begin, length = torch.where(is_row, old[0], old[2]), torch.where(is_row, height[image, cut], width[image, cut])
        at = begin + 1 + (draws[2, :, new] * (length - 1)).long().clamp(max=(length - 2).clamp(min=0))
        can_cut = length > 1
        edges[:, image, new] = old
        edges[0, image, new] = torch.where(is_row & can_cut, at, old[0])
        edges[1, image, cut] = torch.where(is_row & can_cut, at, old[1])
        edges[2, image, new] = torch.where(~is_row & can_cut, at, old[2])
        edges[3, image, cut] = torch.where(~is_row & can_cut, at, old[3])
    top, bottom, left, right = edges.unsqueeze(-1)
    row, column = torch.arange(rows, device=draws.device), torch.arange(columns, device=draws.device)
    inside_rows, inside_columns = (row >= top) & (row < bottom), (column >= left) & (column < right)
    return (inside_rows.unsqueeze(-1) & inside_columns.unsqueeze(-2)).flatten(2)


def embed_regions(patches: Tensor, masks: Tensor, centre: Centre = "none", ranks: Ranks = SINGLE) -> Tensor:
    """Eq. 2: φ(I | R_m) [C, M, D], the normalised sum of the patch features [C, N, D] under each mask [C, M, N].

    `centre` says which mean is subtracted from every patch: none, that of the batch on all `ranks`, or its own image's;
    then a region that covers the image is zero.
    """
    if centre == "none":
        return normalise(masked_sums(patches, masks))
    sums, mean = sum_regions(patches, masks)
    if centre == "batch":
        mean = ranks.mean(mean.mean(0, keepdim=True))
    return centre_regions(sums, masks, mean, centre)


def sum_regions(patches: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """The sums [C, M, D] of patches under masks, and each image's mean patch [C, 1, D]."""
    # One more row covers the image: its mean costs no pass over the patches, neither here nor in the backward.
    rows = torch.cat([masks, torch.ones_like(masks[:, :1])], 1)
    sums, total = masked_sums(patches, rows).split([masks.shape[1], 1], 1)
    return sums, total / patches.shape[1]


def centre_regions(sums: Tensor, masks: Tensor, mean: Tensor, centre: Centre) -> Tensor:
    """φ [C, M, D] of the sums [C, M, D] under masks, with a mean [C or 1, 1, D] subtracted unless `centre` is none."""
    if centre == "none":
        return normalise(sums)
    regions = normalise(subtract(sums, masks, mean))
    if centre == "image":
        # Less its own mean nothing is left of a whole image but rounding, which must not be scaled to length 1.
        regions = regions.masked_fill(masks.all(-1, keepdim=True), 0.0)
    return regions


# 2^16 sets are 65,536 similarities for each node and image; the next region doubles that.
MOST_ENUMERATED = 16


def subset_matrix(regions: int, *, empty: bool = True, device: torch.device | str = "cpu") -> Tensor:
    """Subsets of M regions as rows of zeros and ones [2^M, M]; without the first, empty one where `empty` is false."""
    if regions > MOST_ENUMERATED:
        raise ValueError(f"{regions} regions have 2^{regions} sets: at most {MOST_ENUMERATED} can be enumerated")
    bits = torch.arange(0 if empty else 1, 2**regions, device=device)
    return (bits.unsqueeze(-1) >> torch.arange(regions, device=device)) & 1


def embed_region_sets(regions: Tensor, *, empty: bool = True) -> Tensor:
    """Eq. 1: r_A [C, 2^M, D] for every set A of regions, the sum of its members' embeddings."""
    subsets = subset_matrix(regions.shape[1], empty=empty, device=regions.device)
    return subsets.to(regions.dtype) @ regions


# Unit vectors whose sum is shorter cancel each other: what is left is rounding and has no direction.
SHORTEST_SET = 1e-3


def inverse_set_lengths(regions: Tensor) -> Tensor:
    """1/|r_A| [C, 2^M] of every set A of regions [C, M, D], from their Gram matrix; 0 for the empty set.

    It is 0 as well for sets shorter than SHORTEST_SET, and constant there: their cosine with anything is 0.
    """
    count = regions.shape[1]
    subsets = subset_matrix(count, device=regions.device).to(regions.dtype)
    first, second = torch.triu_indices(count, count, device=regions.device)
    # |r_A|² = Σ_{m ≤ n ∈ A} (2 − [m = n])·⟨φ_m, φ_n⟩: one product, and nothing of 2^M × D.
    pairs = subsets[:, first] * subsets[:, second] * torch.where(first == second, 1, 2)
    squares = (regions @ regions.mT)[:, first, second] @ pairs.T
    long = squares > SHORTEST_SET**2
    return torch.where(long, torch.where(long, squares, 1.0).rsqrt(), 0.0)
