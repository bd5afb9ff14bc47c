"""Each node's best set of regions by cosine (T2R), in Triton: the cosine of the best of 2^M sets, and which it is.

A thread owns one image and one caption, as in `exact_all.py`. It keeps the inverse lengths of 2^6 sets in registers and
goes through the caption's nodes: a set costs an addition, a multiplication and a maximum. The best cosine of each node
so far, and among which 2^6 sets it was found, are in memory. Which of those it is, is looked up at the end: 2^6 sets of
2^M.

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
    nothing = tl.zeros((TILE_B,), tl.float32)
    for high in range(1 << (M - LOW - MIDDLE)):
        at = inverse + (high << (LOW + MIDDLE)) * images + image
        length = load_sets(at, images, valid, LOW)
        length_one = length
        if MIDDLE == 1:
            length_one = load_sets(at + (images << LOW), images, valid, LOW)
        for node in range(first, end):
            row, to = q + node * M * images + image, node * images + image
            sums = set_sums(row, images, valid, 1.0, high, nothing, M, LOW, MIDDLE, -1)
            cosines = sums * length
            if MIDDLE == 1:
                one, _ = middle_sums(row, images, valid, 1.0, LOW, MIDDLE, -1, TILE_B)
                cosines = tl.maximum(cosines, (sums + one) * length_one)
            value = max_over_sets(cosines, LOW)
            before = tl.load(best + to, mask=valid & (high > 0), other=-float("inf"))
            is_better = valid & ((value > before) | (high == 0))
            tl.store(best + to, value, mask=is_better)
            tl.store(numbers + to, tl.zeros((TILE_B,), tl.int32) + high, mask=is_better)
        tl.debug_barrier()  # another thread may read what this one has written
    for node in range(first, end):
        row, to = q + node * M * images + image, node * images + image
        highest = beside_sets(tl.load(best + to, mask=valid, other=0.0), LOW)
        where = tl.load(numbers + to, mask=valid, other=0)
        tl.debug_barrier()  # all have read before one writes
        found_sums = set_sums(row, images, valid, 1.0, where, nothing, M, LOW, MIDDLE, -1)
        number = set_numbers(where, LOW, MIDDLE, TILE_B)
        own = inverse + (where << (LOW + MIDDLE)) * images + image
        # The lowest number of those with the best cosine; the same operations give the same bits.
        found = tl.where(found_sums * load_sets(own, images, valid, LOW) == highest, number, 1 << M)
        if MIDDLE == 1:
            one, _ = middle_sums(row, images, valid, 1.0, LOW, MIDDLE, -1, TILE_B)
            is_best = (found_sums + one) * load_sets(own + (images << LOW), images, valid, LOW) == highest
            found = tl.minimum(found, tl.where(is_best, number + (1 << LOW), 1 << M))
        lowest = -max_over_sets(-found, LOW)
        tl.store(numbers + to, tl.where(lowest < (1 << M), lowest, 0), mask=valid)
