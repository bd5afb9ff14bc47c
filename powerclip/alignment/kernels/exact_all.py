"""Exact scores of all pairs, forward only, in Triton: R2T over all 2^M sets of regions, T2R by its closed form.

Where all pairs are differentiated, `score.py` recomputes their gradient by the plain formulas.

A thread owns one image and one caption. It keeps the best node's similarity for 2^7 sets at a time in registers. The
sums of a node over the sets of five regions come from doubling, (s) → (s, s + q_m); with the four sets of two further
regions added they meet the best ones so far. A set costs little more than one addition and one maximum for each node,
which is the least that enumerating can cost. Sums are whole numbers: Hopper adds two and takes the maximum with a third
in one instruction, and with 28 bits for the largest sum that can be they are finer than float32's. Similarities of
nodes with single regions are read from memory, images side by side: M numbers for 2^M sets.

Axes: T nodes of all captions · B images · M regions · S captions · D width
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from powerclip.alignment.backends import KernelSettings
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.matmul import similarities
from powerclip.alignment.ragged import Segments
from powerclip.alignment.recompute import whole_tiles
from powerclip.alignment.regions import MOST_ENUMERATED

# Four times 2^5 best similarities and 2^5 sums of the present node: 160 of the 255 registers that a thread may have.
LOW_REGIONS, MIDDLE_REGIONS = 5, 2
TILE_IMAGES, WARPS = 128, 4  # one image for each thread
LARGEST_SUM = 2.0**28  # of whole numbers: four of them do not leave 32 bits
# Most similarities q that are in memory at a time: 512 MB.
BLOCK_ELEMENTS = 2**27


def exact_all(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """Q̄ [B, S] in float32 of every image's regions [B, M, D] with every caption's nodes [T, D], M ≤ 16."""
    count = regions.shape[1]
    if count > MOST_ENUMERATED:
        raise ValueError(
            f"the exact kernel enumerates the sets of at most {MOST_ENUMERATED} regions, not of {count}; "
            "take fewer regions or alignment.aggregation: nla"
        )
    offsets = F.pad(segments.lengths.cumsum(0), (1, 0))
    blocks = regions.split(whole_tiles(BLOCK_ELEMENTS // (len(nodes) * count), TILE_IMAGES))
    return torch.cat([_score_block(block, nodes, offsets, config) for block in blocks])


def _score_block(regions: Tensor, nodes: Tensor, offsets: Tensor, config: AlignmentConfig) -> Tensor:
    images, count, _ = regions.shape
    q = similarities(regions, nodes)
    # No similarity is larger than the product of the longest vectors, and no sum than M times that.
    longest = regions.norm(dim=-1).amax() * nodes.norm(dim=-1).amax()
    scale = LARGEST_SUM / (count * longest.float()).clamp(min=1e-20)
    captions = len(offsets) - 1
    scores = torch.empty(captions, images, device=q.device)
    settings = KernelSettings.of(config, count)
    # Captions along the grid's first axis: only that one may be longer than 65,535.
    _exact_scores[(captions, triton.cdiv(images, TILE_IMAGES))](
        q,
        offsets,
        scores,
        scale,
        images,
        settings.t2r_unit,
        # The empty set adds 0 to the sum over sets, so that leaving it out changes only their number.
        settings.r2t_unit / settings.sets,
        **settings.switches,
        M=count,
        LOW=min(count, LOW_REGIONS),
        MIDDLE=min(max(count - LOW_REGIONS, 0), MIDDLE_REGIONS),
        IMAGES=images if images % TILE_IMAGES == 0 else 0,
        FUSED=q.is_cuda,
        TILE_B=TILE_IMAGES,
        num_warps=WARPS,
    )
    return scores.T


@triton.jit
def _exact_scores(
    q,  # [T, M, B] float32
    offsets,  # [S+1] caption c owns nodes offsets[c] … offsets[c+1]-1
    scores,  # [S, B] float32
    scale,  # [] float32: a similarity of 1 as a whole number
    images,
    t2r_scale,
    r2t_scale,
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    T2R: tl.constexpr,
    R2T: tl.constexpr,
    M: tl.constexpr,
    LOW: tl.constexpr,
    MIDDLE: tl.constexpr,
    IMAGES: tl.constexpr,
    FUSED: tl.constexpr,
    TILE_B: tl.constexpr,
):
    if IMAGES:  # known to the compiler where it is round, as in training
        images = IMAGES
    caption = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1) * TILE_B + tl.arange(0, TILE_B)
    valid = image < images
    first, end = tl.load(offsets + caption), tl.load(offsets + caption + 1)

    score = tl.zeros((TILE_B,), tl.float32)
    if T2R:
        mean = tl.zeros((TILE_B,), tl.float32)
        for node in range(first, end):
            mean += _best_set(q + node * M * images + image, images, valid, M, EMPTY, SINGLE, TILE_B)
        score += t2r_scale * mean / (end - first).to(tl.float32)
    if R2T:
        one_unit = tl.load(scale)
        total = tl.zeros((TILE_B,), tl.float32)
        for high in range(1 << (M - LOW - MIDDLE)):
            # The first node is taken out of the loop so that the maxima start in the layout of the sums.
            row = q + first * M * images + image
            sums = _set_sums(row, images, valid, one_unit, high, M, LOW, MIDDLE, TILE_B)
            one, two = _middle(row, images, valid, one_unit, LOW, MIDDLE, TILE_B)
            best, best_one, best_two, best_both = sums, sums + one, sums + two, sums + (one + two)
            for node in range(first + 1, end):
                row = q + node * M * images + image
                sums = _set_sums(row, images, valid, one_unit, high, M, LOW, MIDDLE, TILE_B)
                best = tl.maximum(best, sums)
                one, two = _middle(row, images, valid, one_unit, LOW, MIDDLE, TILE_B)
                if MIDDLE >= 1:
                    best_one = _larger(sums, one, best_one, FUSED)
                if MIDDLE == 2:
                    best_two = _larger(sums, two, best_two, FUSED)
                    best_both = _larger(sums, one + two, best_both, FUSED)
            if MIDDLE >= 1:
                best += best_one
            if MIDDLE == 2:
                best += best_two + best_both
            sum_of_best = best.to(tl.float32)
            for _ in tl.static_range(LOW):
                sum_of_best = tl.sum(sum_of_best, 1)
            total += sum_of_best
        score += r2t_scale * total / one_unit
    tl.store(scores + caption * images + image, score, mask=valid)


@triton.jit
def _best_set(q, stride, valid, M: tl.constexpr, EMPTY: tl.constexpr, SINGLE: tl.constexpr, TILE_B: tl.constexpr):
    """The best set's similarity [B] of one node: all positive regions or, without ∅, at least the highest one."""
    positive = tl.zeros((TILE_B,), tl.float32)
    highest = tl.full((TILE_B,), -float("inf"), tl.float32)
    for region in tl.static_range(M):
        value = tl.load(q + region * stride, mask=valid, other=0.0)
        positive += tl.maximum(value, 0.0)
        highest = tl.maximum(highest, value)
    if SINGLE:
        positive = tl.maximum(highest, 0.0)
    return positive if EMPTY else tl.where(highest > 0.0, positive, highest)


@triton.jit
def _set_sums(
    q, stride, valid, unit, high, M: tl.constexpr, LOW: tl.constexpr, MIDDLE: tl.constexpr, TILE_B: tl.constexpr
):
    """Similarities [B, 2, …, 2] of one node with the sets of the first LOW regions, each joined with the set `high`."""
    sums = tl.zeros((TILE_B,), tl.int32)
    for region in tl.static_range(LOW + MIDDLE, M):
        value = _whole(q + region * stride, valid, unit)
        sums += tl.where((high >> (region - LOW - MIDDLE)) & 1 == 1, value, 0)
    for region in tl.static_range(LOW):
        value = _whole(q + region * stride, valid, unit)
        for _ in tl.static_range(region):
            value = tl.expand_dims(value, 1)
        # A new axis for each region, never flattened: its two halves lie in one thread's registers and stay there.
        sums = tl.join(sums, sums + value)
    return sums


@triton.jit
def _middle(q, stride, valid, unit, LOW: tl.constexpr, MIDDLE: tl.constexpr, TILE_B: tl.constexpr):
    """Similarities of one node with the one or two regions after the first LOW, as [B, 1, …, 1]; zero where none is."""
    one = tl.zeros((TILE_B,), tl.int32)
    two = tl.zeros((TILE_B,), tl.int32)
    if MIDDLE >= 1:
        one = _whole(q + LOW * stride, valid, unit)
    if MIDDLE == 2:
        two = _whole(q + (LOW + 1) * stride, valid, unit)
    for _ in tl.static_range(LOW):
        one = tl.expand_dims(one, 1)
        two = tl.expand_dims(two, 1)
    return one, two


@triton.jit
def _larger(sums, value, best, FUSED: tl.constexpr):
    """max(sums + value, best). Side by side, the two become Hopper's one instruction for both."""
    if FUSED:
        return tl.inline_asm_elementwise(
            "{ .reg .s32 sum; add.s32 sum, $1, $2; max.s32 $0, sum, $3; }",
            "=r,r,r,r",
            [sums, value, best],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.maximum(sums + value, best)


@triton.jit
def _whole(q, valid, unit):
    """Similarities [B] as whole numbers."""
    return (tl.load(q, mask=valid, other=0.0) * unit).to(tl.int32)
