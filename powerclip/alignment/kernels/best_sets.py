"""Each node's best set of regions by cosine (T2R), in Triton: the cosine of the best of 2^M sets, and which it is.

A thread owns one image and one caption, as in `exact_all.py`. It goes through the caption's nodes by twos, and for both
through all sets, 2^6 of them and their inverse lengths in registers at a time: a set costs an addition, a
multiplication and a maximum. It remembers among which 2^6 sets the best one was found; which of those it is, is looked
up at the end.

Axes: T nodes of all captions · B images · M regions · S captions
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels.set_sums import (
    beside_sets,
    load_sets,
    max_over_sets,
    middle_sums,
    set_numbers,
    set_sums,
)
from powerclip.alignment.ragged import Segments
from powerclip.alignment.regions import subset_matrix

# Twice 2^5 inverse lengths, 2^5 sums and 2^5 products of the present node: 128 of the 255 registers of a thread.
LOW_REGIONS, MIDDLE_REGIONS = 5, 1
TILE_IMAGES, WARPS = 128, 4  # one image for each thread


def best_sets(q: Tensor, inverse: Tensor, segments: Segments, config: AlignmentConfig) -> tuple[Tensor, Tensor]:
    """The cosine [T, B] of each node's best set and its number, from q [T, M, B] and inverse lengths [2^M, B]."""
    total, count, images = q.shape
    sizes = subset_matrix(count, device=q.device).sum(-1)
    allowed = (sizes >= (0 if config.empty_set else 1)) & (sizes <= (config.largest_set or count))
    best = torch.empty(total, images, device=q.device)
    numbers = torch.empty(total, images, dtype=torch.int32, device=q.device)
    _best_sets[(len(segments), triton.cdiv(images, TILE_IMAGES))](
        q,
        segments.offsets,
        # A maximum passes over what is no number: a set that does not count costs no comparison.
        torch.where(allowed.unsqueeze(-1), inverse, torch.nan),
        best,
        numbers,
        images,
        M=count,
        LOW=min(count, LOW_REGIONS),
        MIDDLE=min(max(count - LOW_REGIONS, 0), MIDDLE_REGIONS),
        IMAGES=images if images % TILE_IMAGES == 0 else 0,
        TILE_B=TILE_IMAGES,
        num_warps=WARPS,
    )
    return best, numbers


@triton.jit
def _best_sets(
    q,  # [T, M, B] float32
    offsets,  # [S+1] caption c owns nodes offsets[c] … offsets[c+1]-1
    inverse,  # [2^M, B] float32: inverse lengths of the sets, NaN for those that do not count
    best,  # [T, B] float32
    numbers,  # [T, B] int32
    images,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    IMAGES: tl.constexpr,
    TILE_B: tl.constexpr,
):
    if IMAGES:
        images = IMAGES
    caption = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1) * TILE_B + tl.arange(0, TILE_B)
    valid = image < images
    first, end = tl.load(offsets + caption), tl.load(offsets + caption + 1)
    for node in range(first, end, 2):
        # The last node of an odd number is gone through twice.
        other = tl.minimum(node + 1, end - 1)
        row, other_row = q + node * M * images + image, q + other * M * images + image
        cosine, other_cosine = (
            tl.full((TILE_B,), -float("inf"), tl.float32),
            tl.full((TILE_B,), -float("inf"), tl.float32),
        )
        where, other_where = tl.zeros((TILE_B,), tl.int32), tl.zeros((TILE_B,), tl.int32)
        for high in range(1 << (M - LOW - MIDDLE)):
            at = inverse + (high << (LOW + MIDDLE)) * images + image
            length = load_sets(at, images, valid, LOW)
            length_one = length
            if MIDDLE == 1:
                length_one = load_sets(at + (images << LOW), images, valid, LOW)
            highest = _highest(row, length, length_one, images, valid, high, M, LOW, MIDDLE, TILE_B)
            where = tl.where(highest > cosine, high, where)
            cosine = tl.maximum(highest, cosine)
            highest = _highest(other_row, length, length_one, images, valid, high, M, LOW, MIDDLE, TILE_B)
            other_where = tl.where(highest > other_cosine, high, other_where)
            other_cosine = tl.maximum(highest, other_cosine)
        number = _number(row, inverse, cosine, where, image, images, valid, M, LOW, MIDDLE, TILE_B)
        tl.store(best + node * images + image, cosine, mask=valid)
        tl.store(numbers + node * images + image, number, mask=valid)
        number = _number(other_row, inverse, other_cosine, other_where, image, images, valid, M, LOW, MIDDLE, TILE_B)
        tl.store(best + other * images + image, other_cosine, mask=valid)
        tl.store(numbers + other * images + image, number, mask=valid)


@triton.jit
def _highest(
    row,
    length,
    length_one,
    images,
    valid,
    high,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    TILE_B: tl.constexpr,
):
    """The highest cosine [B] of one node among the sets that `high` is joined with."""
    sums = set_sums(row, images, valid, 1.0, high, tl.zeros((TILE_B,), tl.float32), M, LOW, MIDDLE, -1)
    cosines = sums * length
    if MIDDLE == 1:
        one, _ = middle_sums(row, images, valid, 1.0, LOW, MIDDLE, -1, TILE_B)
        cosines = tl.maximum(cosines, (sums + one) * length_one)
    return max_over_sets(cosines, LOW)


@triton.jit
def _number(
    row,
    inverse,
    cosine,
    where,
    image,
    images,
    valid,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    TILE_B: tl.constexpr,
):
    """The number [B] of the set with this cosine, the lowest if there are several, among those joined with `where`."""
    highest = beside_sets(cosine, LOW)
    sums = set_sums(row, images, valid, 1.0, where, tl.zeros((TILE_B,), tl.float32), M, LOW, MIDDLE, -1)
    number = set_numbers(where, LOW, MIDDLE, TILE_B)
    at = inverse + (where << (LOW + MIDDLE)) * images + image
    # The same operations give the same bits.
    found = tl.where(sums * load_sets(at, images, valid, LOW) == highest, number, 1 << M)
    if MIDDLE == 1:
        one, _ = middle_sums(row, images, valid, 1.0, LOW, MIDDLE, -1, TILE_B)
        is_best = (sums + one) * load_sets(at + (images << LOW), images, valid, LOW) == highest
        found = tl.minimum(found, tl.where(is_best, number + (1 << LOW), 1 << M))
    lowest = -max_over_sets(-found, LOW)
    return tl.where(lowest < (1 << M), lowest, 0)
