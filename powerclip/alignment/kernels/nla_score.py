"""NLA scores of all pairs, forward only, in Triton: similarities of nodes with regions are never written to memory.

One pass computes the similarities of a tile of nodes with all regions of a few images and reduces them over the regions
in registers; it writes two numbers for a node and an image instead of M. A tile's sides are powers of two, and M need
not be: its regions are taken in parts of 16, 8, 4, 2 and 1, each a product of its own, so that none is computed in
vain. A second, small pass reduces each caption's nodes. Both read what is there: nodes lie end to end, a caption is a
range of them, nothing is padded to the longest.

With x_m = q_m/τ the sums are X = Σ x, R = Σ relu(x) and P = (Π (1 + e^−|x|) − 1) / e^h, all without cancellation.
Then log Σ_A exp Σ_A x, the soft maximum over the sets that both aggregations need, is

    with ∅      R + log(1 + P),                                       h = 0
    without     L + log(1 − e^−L) for L = R + log(1 + P) where some x > 0, h = 0,
                h + log P where none is, h being the highest x: P is at least 1 and nothing underflows

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
from powerclip.alignment.kernels.settings import KernelSettings
from powerclip.alignment.matmul import split_pair
from powerclip.alignment.ragged import Segments
from powerclip.alignment.recompute import whole_tiles

# 128 nodes with 10 regions of 16 images are 80 registers of a thread in 8 warps. 64 of the width in 3 stages are 108 KB
# of a multiprocessor's 228: with ∅, two programs fit, and one multiplies while the other one reduces.
TILE_NODES, TILE_IMAGES, TILE_WIDTH = 128, 16, 64
WARPS, STAGES = 8, 3
# Without ∅ there is more to reduce, and one program with twice the nodes is faster, as it reads less: on an H200 it
# reaches 47 instead of 42 % of the bare product's rate (with ∅ 52 instead of 55). More regions do not fit in registers.
LARGE_TILE_NODES, MOST_IN_LARGE = 256, 14
REDUCE_IMAGES = 256
# Most nodes × images whose two numbers are in memory at a time: 1 GB.
BLOCK_ELEMENTS = 2**27

LN2 = tl.constexpr(math.log(2))


def nla_score(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """S̄ [B, S] in float32 of every image's regions [B, M, D] with every caption's nodes [T, D].

    bf16 inputs are multiplied as they are; others keep float32's accuracy (see `split.py`).
    """
    regions, nodes = split_pair(regions, nodes)
    if nodes.dtype == torch.bfloat16 and not nodes.is_cuda:
        # Triton's interpreter multiplies the bits of bf16 numbers; the same numbers in float32 it multiplies right.
        regions, nodes = regions.float(), nodes.float()
    nodes = nodes.contiguous()
    offsets = F.pad(segments.lengths.cumsum(0), (1, 0))
    blocks = regions.split(whole_tiles(BLOCK_ELEMENTS // len(nodes), TILE_IMAGES))
    return torch.cat([_score_block(block.contiguous(), nodes, offsets, config) for block in blocks])


def _score_block(regions: Tensor, nodes: Tensor, offsets: Tensor, config: AlignmentConfig) -> Tensor:
    """S̄ [B, S] of regions [B, M, D] with nodes [T, D]."""
    (images, count, _), (total, width) = regions.shape, nodes.shape
    best = torch.empty((total, images) if config.t2r else (1, 1), device=nodes.device)
    inner = torch.empty((total, images) if config.r2t else (1, 1), device=nodes.device)
    settings = KernelSettings.of(config, count)
    tile_nodes = TILE_NODES if config.empty_set or count > MOST_IN_LARGE else LARGE_TILE_NODES
    # Image tiles first: the programs that run at the same time share the images, which then stay in the L2 cache.
    _node_sums[(triton.cdiv(images, TILE_IMAGES) * triton.cdiv(total, tile_nodes),)](
        regions,
        nodes,
        best,
        inner,
        total,
        images,
        width,
        1 / (config.tau * math.log(2)),
        settings.mean_weight,
        settings.alpha,
        settings.log_sets,
        **settings.switches,
        M=count,
        FAST=nodes.is_cuda,
        TILE_T=tile_nodes,
        TILE_B=TILE_IMAGES,
        TILE_D=TILE_WIDTH,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    captions = len(offsets) - 1
    scores = torch.empty(captions, images, device=nodes.device)
    # Captions along the grid's first axis: only that one may be longer than 65,535.
    _caption_scores[(captions, triton.cdiv(images, REDUCE_IMAGES))](
        best,
        inner,
        offsets,
        scores,
        images,
        settings.tau * settings.t2r_unit,
        settings.tau * settings.r2t_unit,
        1.0 - config.alpha,
        T2R=config.t2r,
        R2T=config.r2t,
        TILE_B=REDUCE_IMAGES,
    )
    return scores.T


@triton.jit
def _node_sums(
    regions,  # [B, M, D] bf16 or float16
    nodes,  # [T, D] the same
    best,  # [T, B] float32: the soft maximum over the sets of x, or the best single region's
    inner,  # [T, B] float32: Σ_m ζ_α(x_m/2), or what replaces it without ∅
    total,
    images,
    width,
    bits,  # a similarity of 1 in powers of two: 1 / (τ ln 2)
    mean_weight,
    alpha,
    log_sets,
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    T2R: tl.constexpr,
    R2T: tl.constexpr,
    M: tl.constexpr,
    FAST: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_B: tl.constexpr,
    TILE_D: tl.constexpr,
):
    # One axis of programs: a second one would end at 65,535 tiles of nodes.
    tiles = tl.cdiv(images, TILE_B)
    first = tl.program_id(0) % tiles * TILE_B
    node = (tl.program_id(0) // tiles * TILE_T + tl.arange(0, TILE_T)).to(tl.int64)
    place = tl.arange(0, TILE_D)
    node_there = node < total

    plain = tl.zeros((TILE_T, TILE_B), tl.float32)  # X
    positive = tl.zeros((TILE_T, TILE_B), tl.float32)  # R
    product = tl.zeros((TILE_T, TILE_B), tl.float32)  # P
    highest = tl.full((TILE_T, TILE_B), -float("inf"), tl.float32)
    base = tl.full((TILE_T, TILE_B), 0.0 if EMPTY else -float("inf"), tl.float32)  # h
    for sixteen in tl.static_range(M // 16):
        x = tl.zeros((TILE_T, TILE_B * 16), tl.float32)
        for start in range(0, width, TILE_D):
            left = _load_nodes(nodes, node, node_there, start + place, width)
            right = _load_regions(regions, first, sixteen * 16, start + place, images, width, M, 16, TILE_B)
            x = tl.dot(left, right, x)
        x *= bits
        highest = _highest(highest, x, 16, TILE_T, TILE_B)
        product, base, unit = _raise(product, base, highest, EMPTY, FAST)
        plain, positive, product = _join(plain, positive, product, base, unit, x, FAST, 16, TILE_T, TILE_B)
    if M % 16 > 0:
        rest: tl.constexpr = M // 16 * 16
        x8 = tl.zeros((TILE_T, TILE_B * 8), tl.float32)
        x4 = tl.zeros((TILE_T, TILE_B * 4), tl.float32)
        x2 = tl.zeros((TILE_T, TILE_B * 2), tl.float32)
        x1 = tl.zeros((TILE_T, TILE_B), tl.float32)
        for start in range(0, width, TILE_D):
            at = start + place
            left = _load_nodes(nodes, node, node_there, at, width)
            if M & 8:
                x8 = tl.dot(left, _load_regions(regions, first, rest, at, images, width, M, 8, TILE_B), x8)
            if M & 4:
                after8: tl.constexpr = rest + (M & 8)
                x4 = tl.dot(left, _load_regions(regions, first, after8, at, images, width, M, 4, TILE_B), x4)
            if M & 2:
                after4: tl.constexpr = rest + (M & 12)
                x2 = tl.dot(left, _load_regions(regions, first, after4, at, images, width, M, 2, TILE_B), x2)
            if M & 1:
                x1 = tl.dot(left, _load_regions(regions, first, M - 1, at, images, width, M, 1, TILE_B), x1)
        x8, x4, x2, x1 = x8 * bits, x4 * bits, x2 * bits, x1 * bits
        if M & 8:
            highest = _highest(highest, x8, 8, TILE_T, TILE_B)
        if M & 4:
            highest = _highest(highest, x4, 4, TILE_T, TILE_B)
        if M & 2:
            highest = _highest(highest, x2, 2, TILE_T, TILE_B)
        if M & 1:
            highest = _highest(highest, x1, 1, TILE_T, TILE_B)
        product, base, unit = _raise(product, base, highest, EMPTY, FAST)
        if M & 8:
            plain, positive, product = _join(plain, positive, product, base, unit, x8, FAST, 8, TILE_T, TILE_B)
        if M & 4:
            plain, positive, product = _join(plain, positive, product, base, unit, x4, FAST, 4, TILE_T, TILE_B)
        if M & 2:
            plain, positive, product = _join(plain, positive, product, base, unit, x2, FAST, 2, TILE_T, TILE_B)
        if M & 1:
            plain, positive, product = _join(plain, positive, product, base, unit, x1, FAST, 1, TILE_T, TILE_B)

    plain, positive, highest, base = plain * LN2, positive * LN2, highest * LN2, base * LN2
    soft = log_powerset(positive, product, highest, base, EMPTY)
    image = first + tl.arange(0, TILE_B)
    at = node[:, None] * images + image[None, :]
    there = node_there[:, None] & (image < images)[None, :]
    if T2R:
        if SINGLE:
            tl.store(best + at, tl.maximum(highest, 0.0) if EMPTY else highest, mask=there)
        else:
            tl.store(best + at, soft, mask=there)
    if R2T:
        tl.store(inner + at, mean_weight * plain + alpha * (soft - log_sets), mask=there)


@triton.jit
def _load_nodes(nodes, node, there, place, width):
    """Some of the width of a tile of nodes [T, D]."""
    return tl.load(
        nodes + node[:, None] * width + place[None, :], mask=there[:, None] & (place < width)[None, :], other=0.0
    )


@triton.jit
def _load_regions(
    regions, first, offset, place, images, width, M: tl.constexpr, PART: tl.constexpr, TILE_B: tl.constexpr
):
    """The same of PART regions, from the one numbered `offset` on, of a tile of images [D, PART · B]."""
    column = tl.arange(0, TILE_B * PART)
    image = first + column % TILE_B
    row = image.to(tl.int64) * M + offset + column // TILE_B
    return tl.load(
        regions + row[None, :] * width + place[:, None],
        mask=(image < images)[None, :] & (place < width)[:, None],
        other=0.0,
    )


@triton.jit
def _highest(highest, x, PART: tl.constexpr, TILE_T: tl.constexpr, TILE_B: tl.constexpr):
    """The highest x [T, B] with PART more regions, x [T, PART · B].

    Images lie side by side, so that all regions of one are in the same thread's registers: nothing is exchanged.
    """
    return tl.maximum(highest, tl.max(tl.reshape(x, (TILE_T, PART, TILE_B)), 1))


@triton.jit
def _raise(product, base, highest, EMPTY: tl.constexpr, FAST: tl.constexpr):
    """P in units of the new h, which is no lower than the old one; that h, and e^h. In units of ln 2."""
    if EMPTY:
        return product, base, tl.full(product.shape, 1.0, tl.float32)
    raised = tl.minimum(highest, 0.0)
    return product * exp2(base - raised, FAST), raised, exp2(raised, FAST)


@triton.jit
def _join(
    plain,
    positive,
    product,
    base,
    unit,
    x,
    FAST: tl.constexpr,
    PART: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_B: tl.constexpr,
):
    """The sums [T, B] with PART more regions in them, x [T, PART · B], both in units of ln 2."""
    x = tl.reshape(x, (TILE_T, PART, TILE_B))
    here = powerset_product(x, base[:, None, :], unit[:, None, :], FAST)
    product, unit = join_products(product, unit, here, unit)
    return plain + tl.sum(x, 1), positive + tl.sum(tl.maximum(x, 0.0), 1), product


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2^x. The GPU's own instruction, without the care for results below 1e-38 that would triple it."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def exp(x, FAST: tl.constexpr):
    """e^x, likewise."""
    return exp2(x * (1.0 / LN2), FAST)


@triton.jit
def powerset_product(x, base, unit, FAST: tl.constexpr):
    """P over the regions, the second axis of x; `base` is h, `unit` e^h. In units of ln 2."""
    product, unit = tl.reduce((exp2(-tl.abs(x) - base, FAST), tl.broadcast_to(unit, x.shape)), 1, join_products)
    return product


@triton.jit
def join_products(a, unit, b, same_unit):
    """((1 + e^h·a)(1 + e^h·b) − 1) / e^h without the cancellation, and e^h, which both have."""
    return a + b + unit * a * b, unit


@triton.jit
def log_powerset(positive, product, highest, base, EMPTY: tl.constexpr):
    """The soft maximum over the sets, from the sums over the regions."""
    soft = positive + tl.log(1.0 + product)
    if not EMPTY:
        above = soft + tl.log(1.0 - tl.exp(-tl.maximum(soft, 0.5)))
        soft = tl.where(highest > 0.0, above, base + tl.log(tl.maximum(product, 1.0)))
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
