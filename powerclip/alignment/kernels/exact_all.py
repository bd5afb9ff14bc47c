"""Exact scores of all pairs in Triton: R2T over all 2^M sets of regions, T2R by its closed form; also by cosine.

`exact_all_grad.py` has the gradient. By cosine each set's best sum is multiplied by the set's inverse length, which is
the same for all nodes; T2R then has no closed form, and `best_sets.py` finds each node's best set.

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
import triton
import triton.language as tl
from torch import Tensor

from powerclip.alignment.backends import KernelSettings
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels.best_sets import best_sets
from powerclip.alignment.kernels.set_sums import (
    larger,
    load_sets,
    middle_sums,
    set_sums,
    sum_over_sets,
)
from powerclip.alignment.matmul import similarities
from powerclip.alignment.ragged import Segments, segment_mean
from powerclip.alignment.recompute import whole_tiles
from powerclip.alignment.regions import MOST_ENUMERATED, inverse_set_lengths

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
    per_image = max(len(nodes) * count, 2**count if config.divides_by_lengths else 0)
    blocks = regions.split(whole_tiles(BLOCK_ELEMENTS // per_image, TILE_IMAGES))
    return torch.cat([_score_block(block, nodes, segments, config) for block in blocks])


def _score_block(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    images, count, _ = regions.shape
    q = similarities(regions, nodes)
    settings = KernelSettings.of(config, count)
    inverse = inverse_set_lengths(regions.float()).T.contiguous() if config.divides_by_lengths else None
    scores = torch.empty(len(segments), images, device=q.device)
    # Captions along the grid's first axis: only that one may be longer than 65,535.
    _exact_scores[(len(segments), triton.cdiv(images, TILE_IMAGES))](
        q,
        segments.offsets,
        q if inverse is None else inverse,
        scores,
        LARGEST_SUM / largest_sum(regions, nodes),
        images,
        settings.t2r_unit,
        # The empty set adds 0 to the sum over sets, so that leaving it out changes only their number.
        settings.r2t_unit / settings.sets,
        **{**settings.switches, "T2R": config.t2r and inverse is None},
        M=count,
        LOW=min(count, LOW_REGIONS),
        MIDDLE=min(max(count - LOW_REGIONS, 0), MIDDLE_REGIONS),
        IMAGES=images if images % TILE_IMAGES == 0 else 0,
        FUSED=q.is_cuda,
        LENGTHS=inverse is not None,
        TILE_B=TILE_IMAGES,
        num_warps=WARPS,
    )
    if config.t2r and inverse is not None:
        best, _ = best_sets(q, inverse, segments, config)
        scores += segment_mean(best, segments)
    return scores.T


def largest_sum(regions: Tensor, nodes: Tensor) -> Tensor:
    """What no sum over a set exceeds: M times the product of the longest vectors."""
    longest = regions.norm(dim=-1).amax() * nodes.norm(dim=-1).amax()
    return (regions.shape[1] * longest.float()).clamp(min=1e-20)


@triton.jit
def _exact_scores(
    q,  # [T, M, B] float32
    offsets,  # [S+1] caption c owns nodes offsets[c] … offsets[c+1]-1
    inverse,  # [2^M, B] float32: inverse lengths of the sets, where they count
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
    LENGTHS: tl.constexpr,
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
        nothing = tl.zeros((TILE_B,), tl.int32)
        for high in range(1 << (M - LOW - MIDDLE)):
            # The first node is taken out of the loop so that the maxima start in the layout of the sums.
            row = q + first * M * images + image
            sums = set_sums(row, images, valid, one_unit, high, nothing, M, LOW, MIDDLE, 0)
            one, two = middle_sums(row, images, valid, one_unit, LOW, MIDDLE, 0, TILE_B)
            best, best_one, best_two, best_both = sums, sums + one, sums + two, sums + (one + two)
            for node in range(first + 1, end):
                row = q + node * M * images + image
                sums = set_sums(row, images, valid, one_unit, high, nothing, M, LOW, MIDDLE, 0)
                best = tl.maximum(best, sums)
                one, two = middle_sums(row, images, valid, one_unit, LOW, MIDDLE, 0, TILE_B)
                if MIDDLE >= 1:
                    best_one = larger(sums, one, best_one, FUSED)
                if MIDDLE == 2:
                    best_two = larger(sums, two, best_two, FUSED)
                    best_both = larger(sums, one + two, best_both, FUSED)
            if LENGTHS:
                # The same for all nodes: the best one by sums is the best one by cosine.
                at = inverse + (high << (LOW + MIDDLE)) * images + image
                of_sets = best * load_sets(at, images, valid, LOW)
                if MIDDLE >= 1:
                    of_sets += best_one * load_sets(at + (images << LOW), images, valid, LOW)
                if MIDDLE == 2:
                    of_sets += best_two * load_sets(at + (images << LOW) * 2, images, valid, LOW)
                    of_sets += best_both * load_sets(at + (images << LOW) * 3, images, valid, LOW)
                total += sum_over_sets(of_sets, LOW)
            else:
                if MIDDLE >= 1:
                    best += best_one
                if MIDDLE == 2:
                    best += best_two + best_both
                total += sum_over_sets(best.to(tl.float32), LOW)
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
