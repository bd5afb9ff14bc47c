"""NLA scores of all pairs, forward only, in Triton: similarities of nodes with regions are never written to memory.

One pass computes a tile of nodes × images for one region after the other and keeps only running sums over the regions
in registers; it writes two numbers for a node and an image instead of M. A second, small pass reduces each caption's
nodes. Both read what is there: nodes lie end to end, a caption is a range of them, nothing is padded to the longest.

With x_m = q_m/τ the sums are X = Σ x, R = Σ relu(x) and P = Π (1 + e^−|x|) − 1, all without cancellation. Then
log Σ_A exp Σ_A x, the soft maximum over the sets that both aggregations need, is

    with ∅      R + log(1 + P)
    without     L + log(1 − e^−L) for L = R + log(1 + P) where some x > 0, log P where none is, and
                log Σ_m exp x_m where all are so far below zero that sets of two no longer count (and P underflows)

Axes: T nodes of all captions · B images · M regions · S captions · D width
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels.split import split_pair
from powerclip.alignment.ragged import Segments

# A tile of 64 × 128 in 8 warps is 32 registers of a thread for the product and as many for each of up to five running
# sums: 192 of the 255 that a thread may have. 64 of the width in 3 stages are 72 KB of a multiprocessor's 228 KB.
TILE_NODES, TILE_IMAGES, TILE_WIDTH = 64, 128, 64
WARPS, STAGES = 8, 3
REDUCE_IMAGES = 256
# Most nodes × images whose two numbers are in memory at a time: 1 GB.
BLOCK_ELEMENTS = 2**27

FAR = tl.constexpr(-16.0)  # about log ε of float32, as in `log_powerset`


def nla_score(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """S̄ [B, S] in float32 of every image's regions [B, M, D] with every caption's nodes [T, D].

    bf16 inputs are multiplied as they are; others keep float32's accuracy (see `split.py`).
    """
    # Regions outside, images inside: one region of a tile of images is then a block of rows.
    by_region, nodes = split_pair(regions.transpose(0, 1), nodes)
    if nodes.dtype == torch.bfloat16 and not nodes.is_cuda:
        # Triton's interpreter multiplies the bits of bf16 numbers; the same numbers in float32 it multiplies right.
        by_region, nodes = by_region.float(), nodes.float()
    nodes = nodes.contiguous()
    offsets = F.pad(segments.lengths.cumsum(0), (1, 0))
    blocks = by_region.split(max(TILE_IMAGES, BLOCK_ELEMENTS // len(nodes)), 1)
    return torch.cat([_score_block(block.contiguous(), nodes, offsets, config) for block in blocks])


def _score_block(by_region: Tensor, nodes: Tensor, offsets: Tensor, config: AlignmentConfig) -> Tensor:
    """S̄ [B, S] of regions [M, B, D] with nodes [T, D]."""
    (count, images, _), (total, width) = by_region.shape, nodes.shape
    best = torch.empty((total, images) if config.t2r else (1, 1), device=nodes.device)
    inner = torch.empty((total, images) if config.r2t else (1, 1), device=nodes.device)
    sets = 2**count - (0 if config.empty_set else 1)
    # Image tiles first: the programs that run at the same time share the images, which then stay in the L2 cache.
    _node_sums[(triton.cdiv(images, TILE_IMAGES) * triton.cdiv(total, TILE_NODES),)](
        by_region,
        nodes,
        best,
        inner,
        total,
        images,
        count,
        width,
        1 / config.tau,
        (1 - config.alpha) * 2 ** (count - 1) / sets,
        float(config.alpha),
        math.log(sets),
        EMPTY=config.empty_set,
        SINGLE=config.largest_set == 1,
        T2R=config.t2r,
        R2T=config.r2t,
        TILE_T=TILE_NODES,
        TILE_B=TILE_IMAGES,
        TILE_D=TILE_WIDTH,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    captions = len(offsets) - 1
    mean = config.similarity == "mean"
    scores = torch.empty(captions, images, device=nodes.device)
    # Captions along the grid's first axis: only that one may be longer than 65,535.
    _caption_scores[(captions, triton.cdiv(images, REDUCE_IMAGES))](
        best,
        inner,
        offsets,
        scores,
        images,
        config.tau / (count if mean and config.largest_set != 1 else 1),
        config.tau / (count if mean else 1),
        1.0 - config.alpha,
        T2R=config.t2r,
        R2T=config.r2t,
        TILE_B=REDUCE_IMAGES,
    )
    return scores.T


@triton.jit
def _node_sums(
    regions,  # [M, B, D] bf16 or float16
    nodes,  # [T, D] the same
    best,  # [T, B] float32: the soft maximum over the sets of x, or the best single region's
    inner,  # [T, B] float32: Σ_m ζ_α(x_m/2), or what replaces it without ∅
    total,
    images,
    count,
    width,
    inverse_tau,
    mean_weight,
    alpha,
    log_sets,
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    T2R: tl.constexpr,
    R2T: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_B: tl.constexpr,
    TILE_D: tl.constexpr,
):
    # One axis of programs: a second one would end at 65,535 tiles of nodes.
    tiles = tl.cdiv(images, TILE_B)
    image = tl.program_id(0) % tiles * TILE_B + tl.arange(0, TILE_B)
    node = (tl.program_id(0) // tiles * TILE_T + tl.arange(0, TILE_T)).to(tl.int64)
    place = tl.arange(0, TILE_D)
    node_there, image_there = node < total, image < images

    plain = tl.zeros((TILE_T, TILE_B), tl.float32)  # X
    positive = tl.zeros((TILE_T, TILE_B), tl.float32)  # R
    product = tl.zeros((TILE_T, TILE_B), tl.float32)  # P
    highest = tl.full((TILE_T, TILE_B), -float("inf"), tl.float32)
    singles = tl.zeros((TILE_T, TILE_B), tl.float32)  # Σ exp(x − highest)
    x = tl.zeros((TILE_T, TILE_B), tl.float32)
    # One loop over regions and width: the loads of the next region are under way while sums of this one are taken.
    chunks = tl.cdiv(width, TILE_D)
    for step in range(count * chunks):
        region, start = step // chunks, step % chunks * TILE_D
        inside = start + place < width
        left = tl.load(
            nodes + node[:, None] * width + (start + place)[None, :],
            mask=node_there[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            regions + (region * images + image).to(tl.int64)[None, :] * width + (start + place)[:, None],
            mask=image_there[None, :] & inside[:, None],
            other=0.0,
        )
        x = tl.dot(left, right, x)
        if start + TILE_D >= width:
            x = x * inverse_tau
            if R2T:
                plain += x
            positive, product, highest, singles = add_region(x, positive, product, highest, singles, EMPTY, SINGLE)
            x = tl.zeros((TILE_T, TILE_B), tl.float32)

    soft = log_powerset(positive, product, highest, singles, EMPTY)
    at = node[:, None] * images + image[None, :]
    there = node_there[:, None] & image_there[None, :]
    if T2R:
        if SINGLE:
            tl.store(best + at, tl.maximum(highest, 0.0) if EMPTY else highest, mask=there)
        else:
            tl.store(best + at, soft, mask=there)
    if R2T:
        tl.store(inner + at, mean_weight * plain + alpha * (soft - log_sets), mask=there)


@triton.jit
def add_region(x, positive, product, highest, singles, EMPTY: tl.constexpr, SINGLE: tl.constexpr):
    """The running sums R, P, the highest x and Σ exp(x − highest) with one more region in them."""
    positive += tl.maximum(x, 0.0)
    product += tl.exp(-tl.abs(x)) * (1.0 + product)
    if not EMPTY:
        # Rescaled whenever a new maximum comes: one of the two exponents is always zero.
        change = tl.exp(-tl.abs(x - highest))
        singles = tl.where(x > highest, singles * change + 1.0, singles + change)
    if SINGLE or not EMPTY:
        highest = tl.maximum(highest, x)
    return positive, product, highest, singles


@triton.jit
def log_powerset(positive, product, highest, singles, EMPTY: tl.constexpr):
    """The soft maximum over the sets, from the running sums over the regions."""
    soft = positive + tl.log(1.0 + product)
    if not EMPTY:
        above = soft + tl.log(1.0 - tl.exp(-tl.maximum(soft, 0.5)))
        below = tl.log(tl.maximum(product, 1e-30))
        soft = tl.where(highest > 0.0, above, tl.where(highest > FAR, below, highest + tl.log(singles)))
    return soft


@triton.jit
def _caption_scores(
    best,  # [T, B]
    inner,  # [T, B]
    offsets,  # [S+1] caption c owns nodes offsets[c] … offsets[c+1]-1
    scores,  # [S, B]
    images,
    t2r_scale,
    r2t_scale,
    log_weight,
    T2R: tl.constexpr,
    R2T: tl.constexpr,
    TILE_B: tl.constexpr,
):
    caption = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1) * TILE_B + tl.arange(0, TILE_B)
    there = image < images
    first, end = tl.load(offsets + caption), tl.load(offsets + caption + 1)

    mean = tl.zeros((TILE_B,), tl.float32)
    highest = tl.full((TILE_B,), -float("inf"), tl.float32)
    spread = tl.zeros((TILE_B,), tl.float32)  # Σ exp(inner − highest)
    for node in range(first, end):
        at = node * images + image
        if T2R:
            mean += tl.load(best + at, mask=there, other=0.0)
        if R2T:
            value = tl.load(inner + at, mask=there, other=0.0)
            change = tl.exp(-tl.abs(value - highest))
            spread = tl.where(value > highest, spread * change + 1.0, spread + change)
            highest = tl.maximum(highest, value)
    length = (end - first).to(tl.float32)
    score = tl.zeros((TILE_B,), tl.float32)
    if T2R:
        score += t2r_scale * mean / length
    if R2T:
        score += r2t_scale * (highest + tl.log(spread) - log_weight * tl.log(length))
    tl.store(scores + caption * images + image, score, mask=there)
