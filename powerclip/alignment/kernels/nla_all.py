"""NLA scores of all pairs with their gradient, in Triton: what the softmax over all negatives needs.

Similarities come from the tensor cores as [T, M, B], accurate to float32. One kernel turns them into scores, another
one into the gradient of every similarity, each in one pass: a program owns a caption and a tile of images, so that sums
over regions and over nodes stay in registers and nothing is added by two programs. The gradient of q is written as
float16 numbers, scaled by the largest gradient of a score, and multiplied back by the tensor cores, block of images by
block. `powerset_sums.py` has the formulas.

Similarities are kept for the backward while there are at most KEPT_ELEMENTS of them. Beyond, and where no gradient is
needed, the forward computes them block of images by block, and the backward computes them again.

Axes: T nodes of all captions · B images · M regions · S captions · D width
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from powerclip.alignment.backends import KernelSettings
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels.powerset_sums import best_set, exp, log_powerset, set_weight, weight_unit
from powerclip.alignment.matmul import by_region, halves, input_gradients, product, similarities, split_pair
from powerclip.alignment.ragged import Segments
from powerclip.alignment.recompute import ScoreImpl, recompute, whole_tiles

TILE_IMAGES, SMALL_TILE_IMAGES = 128, 32  # one image for each thread, four warps or one
KEPT_ELEMENTS = 2**28  # 1 GB
# Most similarities that are computed again, or whose gradient is in memory, at a time: 512 MB. With less the products
# that end with few regions no longer fill a GPU.
BLOCK_ELEMENTS = 2**27
FORWARD_ELEMENTS = 2**26  # most similarities at a time of a forward that keeps none: 256 MB


def nla_all(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """S̄ [B, S] of every image's regions [B, M, D] with every caption's nodes [T, D], with a gradient."""
    if keeps_similarities(regions, nodes):
        return _NlaAll.apply(regions, nodes, segments, config)
    block = whole_tiles(BLOCK_ELEMENTS // (len(nodes) * regions.shape[1]), TILE_IMAGES)
    return recompute(regions, nodes, segments, config, ScoreImpl(nla_forward_blocked, _gradient_block, block))


def keeps_similarities(regions: Tensor, nodes: Tensor) -> bool:
    """Whether the similarities of all regions [B, M, D] and nodes [T, D] are kept between forward and backward."""
    return len(nodes) * regions.shape[0] * regions.shape[1] <= KEPT_ELEMENTS


class _NlaAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
        q = similarities(regions, nodes)
        ctx.save_for_backward(regions, nodes, q)
        ctx.segments, ctx.config = segments, config
        scores = torch.empty(len(segments), len(regions), device=q.device)
        _launch(_scores, q, segments, config, scores)
        return scores.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        regions, nodes, q = ctx.saved_tensors
        of_regions, of_nodes = _input_gradients(q, regions, nodes, gradients[0], ctx.segments, ctx.config)
        return of_regions, of_nodes, None, None


@torch.no_grad()
def nla_forward_blocked(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """The scores [B, S] alone: the similarities of one block of images are in memory at a time."""
    images, count, _ = regions.shape
    left, right = split_pair(nodes, by_region(regions))
    per_image = len(nodes) * count
    # A block of one tile is the least: past 200,000 nodes, M = 10, it would be more than KEPT_ELEMENTS.
    tile = TILE_IMAGES if per_image * TILE_IMAGES <= KEPT_ELEMENTS else SMALL_TILE_IMAGES
    blocks = []
    for rows in right.view(count, images, -1).split(whole_tiles(FORWARD_ELEMENTS // per_image, tile), 1):
        q = product(left, rows.flatten(0, 1).T).view(len(nodes), count, -1)
        blocks.append(torch.empty(len(segments), q.shape[2], device=q.device))
        _launch(_scores, q, segments, config, blocks[-1])
    return torch.cat(blocks, 1).T


def _gradient_block(
    regions: Tensor, nodes: Tensor, gradient: Tensor, segments: Segments, config: AlignmentConfig
) -> tuple[Tensor, Tensor]:
    """Gradients of the block's regions [B, M, D] and of the nodes [T, D] for the gradient of its scores [B, S]."""
    return _input_gradients(similarities(regions, nodes), regions, nodes, gradient, segments, config)


def _input_gradients(
    q: Tensor, regions: Tensor, nodes: Tensor, gradient: Tensor, segments: Segments, config: AlignmentConfig
) -> tuple[Tensor, Tensor]:
    """The same with the similarities [T, M, B] known."""
    (total, count, images), width = q.shape, nodes.shape[1]
    # Float16 ends at 6e-8: in units of the largest gradient of a score, what ends there adds nothing.
    unit = gradient.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    scaled = (gradient.float() / unit).T
    node_halves = halves(nodes)
    region_high, region_low = (half.view(count, images, width) for half in halves(by_region(regions)))
    of_regions, of_nodes = [], torch.zeros(total, width, device=q.device)
    size = whole_tiles(BLOCK_ELEMENTS // (total * count), TILE_IMAGES)
    blocks = (q.split(size, 2), scaled.split(size, 1), region_high.split(size, 1), region_low.split(size, 1))
    for part, of_scores, high, low in zip(*blocks, strict=True):
        of_q = torch.empty(total, 2 * count * part.shape[2], dtype=torch.float16, device=q.device)
        _launch(_similarity_gradients, part, segments, config, of_scores.contiguous(), of_q)
        of_block, of_nodes_block = input_gradients(of_q, node_halves, (high.flatten(0, 1), low.flatten(0, 1)))
        of_nodes += of_nodes_block
        of_regions.append(of_block.view(count, -1, width).transpose(0, 1))
    return (unit * torch.cat(of_regions)).to(regions.dtype), of_nodes.mul_(unit).to(nodes.dtype)


def _launch(kernel: Any, q: Tensor, segments: Segments, config: AlignmentConfig, *tensors: Tensor) -> None:
    """Run a kernel over captions × tiles of images."""
    _, count, images = q.shape
    settings = KernelSettings.of(config, count)
    tile = TILE_IMAGES if images > SMALL_TILE_IMAGES else SMALL_TILE_IMAGES
    # Captions along the grid's first axis: only that one may be longer than 65,535.
    kernel[(len(segments), triton.cdiv(images, tile))](
        q,
        segments.offsets,
        *tensors,
        images,
        q.stride(1),
        *settings.numbers,
        **settings.switches,
        M=count,
        IMAGES=images if images % tile == 0 else 0,
        STRIDE=q.stride(1) if q.stride(1) % tile == 0 else 0,
        FAST=q.is_cuda,
        TILE_B=tile,
        num_warps=tile // 32,
    )


@triton.jit
def _scores(
    q,  # [T, M, B] float32, images side by side, `stride` from region to region
    offsets,  # [S+1] caption c owns nodes offsets[c] … offsets[c+1]-1
    scores,  # [S, B] float32
    images,
    stride,
    tau,
    t2r_unit,
    r2t_unit,
    mean_weight,
    alpha,
    log_sets,
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    T2R: tl.constexpr,
    R2T: tl.constexpr,
    M: tl.constexpr,
    IMAGES: tl.constexpr,
    STRIDE: tl.constexpr,
    FAST: tl.constexpr,
    TILE_B: tl.constexpr,
):
    # Known to the compiler where they are round, as in training: a quarter of the instructions were addresses.
    if IMAGES:
        images = IMAGES
    if STRIDE:
        stride = STRIDE
    caption = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1) * TILE_B + tl.arange(0, TILE_B)
    valid = image < images
    first, end = tl.load(offsets + caption), tl.load(offsets + caption + 1)
    mean = tl.zeros((TILE_B,), tl.float32)
    outer = tl.full((TILE_B,), -float("inf"), tl.float32)
    total = tl.zeros((TILE_B,), tl.float32)
    for node in range(first, end):
        plain, soft, highest, _, _, _, _ = _node_sums(
            q + node * M * stride + image, stride, valid, 1 / tau, EMPTY, SINGLE, FAST, M, TILE_B
        )
        if T2R:
            mean += best_set(soft, highest, EMPTY, SINGLE)
        if R2T:
            outer, total = _add_node(mean_weight * plain + alpha * (soft - log_sets), outer, total, FAST)
    length = (end - first).to(tl.float32)
    score = tl.zeros((TILE_B,), tl.float32)
    if T2R:
        score += tau * t2r_unit * mean / length
    if R2T:
        score += tau * r2t_unit * (outer + tl.log(total) - (1.0 - alpha) * tl.log(length))
    tl.store(scores + caption * images + image, score, mask=valid)


@triton.jit
def _similarity_gradients(
    q,  # [T, M, B] float32, images side by side, `stride` from region to region
    offsets,  # [S+1]
    of_scores,  # [S, B] float32: the gradient of the scores
    of_q,  # [T, 2, M, B] float16: the gradient of q rounded, and what rounding lost
    images,
    stride,
    tau,
    t2r_unit,
    r2t_unit,
    mean_weight,
    alpha,
    log_sets,
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    T2R: tl.constexpr,
    R2T: tl.constexpr,
    M: tl.constexpr,
    IMAGES: tl.constexpr,
    STRIDE: tl.constexpr,
    FAST: tl.constexpr,
    TILE_B: tl.constexpr,
):
    # Known to the compiler where they are round, as in training: a quarter of the instructions were addresses.
    if IMAGES:
        images = IMAGES
    if STRIDE:
        stride = STRIDE
    caption = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1) * TILE_B + tl.arange(0, TILE_B)
    valid = image < images
    first, end = tl.load(offsets + caption), tl.load(offsets + caption + 1)
    of_score = tl.load(of_scores + caption * images + image, mask=valid, other=0.0)
    outer = tl.full((TILE_B,), -float("inf"), tl.float32)
    total = tl.zeros((TILE_B,), tl.float32)
    if R2T:
        for node in range(first, end):
            plain, soft, _, _, _, _, _ = _node_sums(
                q + node * M * stride + image, stride, valid, 1 / tau, EMPTY, SINGLE, FAST, M, TILE_B
            )
            outer, total = _add_node(mean_weight * plain + alpha * (soft - log_sets), outer, total, FAST)
        outer += tl.log(total)
    of_best = of_score * t2r_unit / (end - first).to(tl.float32)
    for node in range(first, end):
        at = q + node * M * stride + image
        plain, soft, highest, tied, base, unit, shared = _node_sums(
            at, stride, valid, 1 / tau, EMPTY, SINGLE, FAST, M, TILE_B
        )
        share = tl.zeros((TILE_B,), tl.float32)
        if R2T:
            share = of_score * r2t_unit * exp(mean_weight * plain + alpha * (soft - log_sets) - outer, FAST)
        for region in tl.static_range(M):
            x = tl.load(at + region * stride, mask=valid, other=0.0) * (1 / tau)
            weight = set_weight(x, base, unit, shared, FAST)
            gradient = tl.zeros((TILE_B,), tl.float32)
            if T2R:
                if SINGLE:
                    is_best = x == highest
                    if EMPTY:
                        is_best = is_best & (highest > 0.0)
                    gradient += tl.where(is_best, of_best / tied, 0.0)
                else:
                    gradient += of_best * weight
            if R2T:
                gradient += share * (alpha * weight + mean_weight)
            rounded = gradient.to(tl.float16)
            to = of_q + (2 * node * M + region) * images + image
            tl.store(to, rounded, mask=valid)
            tl.store(to + M * images, (gradient - rounded.to(tl.float32)).to(tl.float16), mask=valid)


@triton.jit
def _node_sums(
    q,
    stride,
    valid,
    inverse_tau,
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    FAST: tl.constexpr,
    M: tl.constexpr,
    TILE_B: tl.constexpr,
):
    """Of one node: Σ x, the soft maximum over the sets, the highest x, how many regions have it, and h, e^h and the
    factor of its set weights. `powerset_sums.py` has the formulas.
    """
    plain = tl.zeros((TILE_B,), tl.float32)
    highest = tl.full((TILE_B,), -float("inf"), tl.float32)
    tied = tl.zeros((TILE_B,), tl.float32)
    for region in tl.static_range(M):
        x = tl.load(q + region * stride, mask=valid, other=0.0) * inverse_tau
        plain += x
        if SINGLE:
            tied = tl.where(x > highest, 1.0, tl.where(x == highest, tied + 1.0, tied))
        highest = tl.maximum(highest, x)
    base = tl.zeros((TILE_B,), tl.float32)
    if not EMPTY:
        base = tl.minimum(highest, 0.0)
    unit = exp(base, FAST)
    positive = tl.zeros((TILE_B,), tl.float32)
    product = tl.zeros((TILE_B,), tl.float32)
    for region in tl.static_range(M):
        x = tl.load(q + region * stride, mask=valid, other=0.0) * inverse_tau
        positive += tl.maximum(x, 0.0)
        product += exp(-tl.abs(x) - base, FAST) * (1.0 + unit * product)
    soft = log_powerset(positive, product, highest, base, EMPTY)
    return plain, soft, highest, tied, base, unit, weight_unit(soft, product, highest, unit, EMPTY, FAST)


@triton.jit
def _add_node(inner, outer, total, FAST: tl.constexpr):
    """The running maximum over nodes and Σ exp(inner − maximum) with one more node."""
    change = exp(-tl.abs(inner - outer), FAST)
    total = tl.where(inner > outer, total * change + 1.0, total + change)
    return tl.maximum(inner, outer), total
