"""Exact scores of all pairs, forward only, in Triton: R2T over all 2^M sets of regions, T2R by its closed form.

A thread owns one image and one caption. It keeps the best node's similarity for 2^6 sets at a time in registers; the
sums of a node over these sets come from doubling, (s) → (s, s + q_m), so that a set costs one addition and one maximum
for each node, which is the least that enumerating can cost. Similarities of nodes with single regions are read from
memory, images side by side: M numbers for 2^M sets.

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

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels.split import split_pair
from powerclip.alignment.ragged import Segments
from powerclip.alignment.regions import MOST_ENUMERATED

# 2^6 best similarities and as many sums of the present node: about 140 of the 255 registers that a thread may have.
LOW_REGIONS = 6
TILE_IMAGES, WARPS = 128, 4  # one image for each thread
# Most similarities q that are in memory at a time: 512 MB.
BLOCK_ELEMENTS = 2**27


def exact_score(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """Q̄ [B, S] in float32 of every image's regions [B, M, D] with every caption's nodes [T, D], M ≤ 16."""
    count = regions.shape[1]
    if count > MOST_ENUMERATED:
        raise ValueError(
            f"the exact kernel enumerates the sets of at most {MOST_ENUMERATED} regions, not of {count}; "
            "take fewer regions or alignment.aggregation: nla"
        )
    offsets = F.pad(segments.lengths.cumsum(0), (1, 0))
    blocks = regions.split(max(1, BLOCK_ELEMENTS // (len(nodes) * count)))
    return torch.cat([_score_block(block, nodes, offsets, config) for block in blocks])


def _score_block(regions: Tensor, nodes: Tensor, offsets: Tensor, config: AlignmentConfig) -> Tensor:
    images, count, _ = regions.shape
    q = _similarities(regions, nodes)
    captions = len(offsets) - 1
    scores = torch.empty(captions, images, device=q.device)
    mean = config.similarity == "mean"
    # Captions along the grid's first axis: only that one may be longer than 65,535.
    _exact_scores[(captions, triton.cdiv(images, TILE_IMAGES))](
        q,
        offsets,
        scores,
        images,
        1 / (count if mean and config.largest_set != 1 else 1),
        # The empty set adds 0 to the sum over sets, so that leaving it out changes only their number.
        1 / ((2**count - (0 if config.empty_set else 1)) * (count if mean else 1)),
        EMPTY=config.empty_set,
        SINGLE=config.largest_set == 1,
        T2R=config.t2r,
        R2T=config.r2t,
        M=count,
        LOW=min(count, LOW_REGIONS),
        TILE_B=TILE_IMAGES,
        num_warps=WARPS,
    )
    return scores.T


def _similarities(regions: Tensor, nodes: Tensor) -> Tensor:
    """⟨φ_m, p_B⟩ as [T, M, B] in float32: images side by side, as the kernel reads them."""
    images, count, width = regions.shape
    by_region = regions.transpose(0, 1).reshape(count * images, width)
    if regions.is_cuda:
        left, right = split_pair(nodes, by_region)
        q = torch.mm(left, right.T, out_dtype=torch.float32)
    else:
        q = nodes.float() @ by_region.float().T
    return q.view(len(nodes), count, images)


@triton.jit
def _exact_scores(
    q,  # [T, M, B] float32
    offsets,  # [S+1] caption c owns nodes offsets[c] … offsets[c+1]-1
    scores,  # [S, B] float32
    images,
    t2r_scale,
    r2t_scale,
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    T2R: tl.constexpr,
    R2T: tl.constexpr,
    M: tl.constexpr,
    LOW: tl.constexpr,
    TILE_B: tl.constexpr,
):
    caption = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1) * TILE_B + tl.arange(0, TILE_B)
    there = image < images
    first, end = tl.load(offsets + caption), tl.load(offsets + caption + 1)

    score = tl.zeros((TILE_B,), tl.float32)
    if T2R:
        mean = tl.zeros((TILE_B,), tl.float32)
        for node in range(first, end):
            mean += _best_set(q + node * M * images + image, images, there, M, EMPTY, SINGLE, TILE_B)
        score += t2r_scale * mean / (end - first).to(tl.float32)
    if R2T:
        total = tl.zeros((TILE_B,), tl.float32)
        for high in range(1 << (M - LOW)):
            # The first node is taken out of the loop so that the maximum starts in the layout of the sums.
            best = _set_sums(q + first * M * images + image, images, there, high, M, LOW, TILE_B)
            for node in range(first + 1, end):
                sums = _set_sums(q + node * M * images + image, images, there, high, M, LOW, TILE_B)
                best = tl.maximum(best, sums)
            for _ in tl.static_range(LOW):
                best = tl.sum(best, 1)
            total += best
        score += r2t_scale * total
    tl.store(scores + caption * images + image, score, mask=there)


@triton.jit
def _best_set(q, stride, there, M: tl.constexpr, EMPTY: tl.constexpr, SINGLE: tl.constexpr, TILE_B: tl.constexpr):
    """The best set's similarity [B] of one node: all positive regions or, without ∅, at least the highest one."""
    positive = tl.zeros((TILE_B,), tl.float32)
    highest = tl.full((TILE_B,), -float("inf"), tl.float32)
    for region in tl.static_range(M):
        value = tl.load(q + region * stride, mask=there, other=0.0)
        positive += tl.maximum(value, 0.0)
        highest = tl.maximum(highest, value)
    if SINGLE:
        positive = tl.maximum(highest, 0.0)
    return positive if EMPTY else tl.where(highest > 0.0, positive, highest)


@triton.jit
def _set_sums(q, stride, there, high, M: tl.constexpr, LOW: tl.constexpr, TILE_B: tl.constexpr):
    """Similarities [B, 2, …, 2] of one node with the sets of the first LOW regions, each joined with the set `high`."""
    base = tl.zeros((TILE_B,), tl.float32)
    for region in tl.static_range(LOW, M):
        value = tl.load(q + region * stride, mask=there, other=0.0)
        base += tl.where((high >> (region - LOW)) & 1 == 1, value, 0.0)
    sums = base
    for region in tl.static_range(LOW):
        value = tl.load(q + region * stride, mask=there, other=0.0)
        for _ in tl.static_range(region):
            value = tl.expand_dims(value, 1)
        # A new axis for each region, never flattened: its two halves lie in one thread's registers and stay there.
        sums = tl.join(sums, sums + value)
    return sums
