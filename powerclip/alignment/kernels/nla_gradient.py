"""NLA scores of all pairs with their gradient, in Triton: what the softmax over all negatives needs.

Similarities come from the tensor cores as [T, M, B], accurate to float32. One kernel turns them into scores, another
one into the gradient of every similarity, each in one pass: a program owns a caption and a tile of images, so that sums
over regions and over nodes stay in registers and nothing is added by two programs. The gradient of q is written as
float16 numbers, scaled by the largest gradient of a score, and multiplied back by the tensor cores, block of images by
block.

`nla_recompute.py` has the formulas. Similarities are kept for the backward while there are at most KEPT_ELEMENTS of
them; beyond, scores come from the fused kernel that never writes them, and the backward computes them again, block by
block.

Axes: T nodes of all captions · B images · M regions · S captions · D width
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels.nla_score import exp, log_powerset, nla_score
from powerclip.alignment.kernels.settings import KernelSettings
from powerclip.alignment.matmul import by_region, halves, product, similarities, split_pair
from powerclip.alignment.ragged import Segments
from powerclip.alignment.recompute import Way, recompute, whole_tiles

TILE_IMAGES, WARPS = 128, 4  # one image for each thread
KEPT_ELEMENTS = 2**28  # 1 GB
# Most similarities that are computed again, or whose gradient is in memory, at a time: 512 MB. With less the products
# that end with few regions no longer fill a GPU.
BLOCK_ELEMENTS = 2**27
PASSING_ELEMENTS = 2**26  # most that nothing keeps: 256 MB


def nla_gradient(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """S̄ [B, S] of every image's regions [B, M, D] with every caption's nodes [T, D], with a gradient."""
    if keeps_similarities(regions, nodes):
        return _Scores.apply(regions, nodes, segments, config)
    block = whole_tiles(BLOCK_ELEMENTS // (len(nodes) * regions.shape[1]), TILE_IMAGES)
    way = Way(nla_score, _gradient_block, block)
    return recompute(regions, nodes, segments, config, way)


def keeps_similarities(regions: Tensor, nodes: Tensor) -> bool:
    """Whether the similarities of all regions [B, M, D] and nodes [T, D] fit between forward and backward."""
    return len(nodes) * regions.shape[0] * regions.shape[1] <= KEPT_ELEMENTS


class _Scores(torch.autograd.Function):
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
        of_regions, of_nodes = _back(q, regions, nodes, gradients[0], ctx.segments, ctx.config)
        return of_regions, of_nodes, None, None


@torch.no_grad()
def nla_in_passing(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """The scores [B, S] alone: similarities of a block of images are written over by those of the next.

    In float32 this costs less than the fused kernel, which is for nodes so many that not even a tile of images fits.
    """
    images, count, _ = regions.shape
    if len(nodes) * count * TILE_IMAGES > KEPT_ELEMENTS:
        return nla_score(regions, nodes, segments, config)
    left, right = split_pair(nodes, by_region(regions))
    parts = []
    size = whole_tiles(PASSING_ELEMENTS // (len(nodes) * count), TILE_IMAGES)
    for rows in right.view(count, images, -1).split(size, 1):
        q = product(left, rows.flatten(0, 1).T).view(len(nodes), count, -1)
        parts.append(torch.empty(len(segments), q.shape[2], device=q.device))
        _launch(_scores, q, segments, config, parts[-1])
    return torch.cat(parts, 1).T


def _gradient_block(
    regions: Tensor, nodes: Tensor, gradient: Tensor, segments: Segments, config: AlignmentConfig
) -> tuple[Tensor, Tensor]:
    """Gradients of the block's regions [B, M, D] and of the nodes [T, D] for the gradient of its scores [B, S]."""
    return _back(similarities(regions, nodes), regions, nodes, gradient, segments, config)


def _back(
    q: Tensor, regions: Tensor, nodes: Tensor, gradient: Tensor, segments: Segments, config: AlignmentConfig
) -> tuple[Tensor, Tensor]:
    (total, count, images), width = q.shape, nodes.shape[1]
    # Float16 ends at 6e-8: in units of the largest gradient of a score, what ends there adds nothing.
    unit = gradient.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    given = (gradient.float() / unit).T
    node_high, node_low = halves(nodes)
    region_high, region_low = (half.view(count, images, width) for half in halves(by_region(regions)))
    of_regions, of_nodes = [], torch.zeros(total, width, device=q.device)
    size = whole_tiles(BLOCK_ELEMENTS // (total * count), TILE_IMAGES)
    blocks = (q.split(size, 2), given.split(size, 1), region_high.split(size, 1), region_low.split(size, 1))
    for part, slopes, high, low in zip(*blocks, strict=True):
        # A row is what a node's similarities send back: rounded, and then what rounding lost.
        sent = torch.empty(total, 2 * count * part.shape[2], dtype=torch.float16, device=q.device)
        _launch(_similarity_gradients, part, segments, config, slopes.contiguous(), sent)
        half = sent.shape[1] // 2
        high, low = high.flatten(0, 1), low.flatten(0, 1)
        of_nodes += product(sent, torch.cat([high, high]))
        of_nodes += product(sent[:, :half], low)
        found = product(sent.T, node_high).unflatten(0, (2, half)).sum(0)
        found += product(sent[:, :half].T, node_low)
        of_regions.append(found.view(count, -1, width).transpose(0, 1))
    return (unit * torch.cat(of_regions)).to(regions.dtype), of_nodes.mul_(unit).to(nodes.dtype)


def _launch(kernel: Any, q: Tensor, segments: Segments, config: AlignmentConfig, *tensors: Tensor) -> None:
    """Run a kernel over captions × tiles of images."""
    _, count, images = q.shape
    settings = KernelSettings.of(config, count)
    # Captions along the grid's first axis: only that one may be longer than 65,535.
    kernel[(len(segments), triton.cdiv(images, TILE_IMAGES))](
        q,
        F.pad(segments.lengths.cumsum(0), (1, 0)),
        *tensors,
        images,
        q.stride(1),
        *settings.numbers,
        **settings.switches,
        M=count,
        IMAGES=images if images % TILE_IMAGES == 0 else 0,
        STRIDE=q.stride(1) if q.stride(1) % TILE_IMAGES == 0 else 0,
        FAST=q.is_cuda,
        TILE_B=TILE_IMAGES,
        num_warps=WARPS,
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
    there = image < images
    first, end = tl.load(offsets + caption), tl.load(offsets + caption + 1)
    mean = tl.zeros((TILE_B,), tl.float32)
    outer = tl.full((TILE_B,), -float("inf"), tl.float32)
    spread = tl.zeros((TILE_B,), tl.float32)
    for node in range(first, end):
        plain, soft, highest, _, _, _, _ = _node_sums(
            q + node * M * stride + image, stride, there, 1 / tau, EMPTY, SINGLE, FAST, M, TILE_B
        )
        if T2R:
            mean += best_set(soft, highest, EMPTY, SINGLE)
        if R2T:
            outer, spread = _add_node(mean_weight * plain + alpha * (soft - log_sets), outer, spread, FAST)
    length = (end - first).to(tl.float32)
    score = tl.zeros((TILE_B,), tl.float32)
    if T2R:
        score += tau * t2r_unit * mean / length
    if R2T:
        score += tau * r2t_unit * (outer + tl.log(spread) - (1.0 - alpha) * tl.log(length))
    tl.store(scores + caption * images + image, score, mask=there)


@triton.jit
def _similarity_gradients(
    q,  # [T, M, B] float32, images side by side, `stride` from region to region
    offsets,  # [S+1]
    given,  # [S, B] float32: the gradient of the scores
    sent,  # [T, 2, M, B] float16: the gradient of q rounded, and what rounding lost
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
    there = image < images
    first, end = tl.load(offsets + caption), tl.load(offsets + caption + 1)
    slope = tl.load(given + caption * images + image, mask=there, other=0.0)
    outer = tl.full((TILE_B,), -float("inf"), tl.float32)
    spread = tl.zeros((TILE_B,), tl.float32)
    if R2T:
        for node in range(first, end):
            plain, soft, _, _, _, _, _ = _node_sums(
                q + node * M * stride + image, stride, there, 1 / tau, EMPTY, SINGLE, FAST, M, TILE_B
            )
            outer, spread = _add_node(mean_weight * plain + alpha * (soft - log_sets), outer, spread, FAST)
        outer += tl.log(spread)
    of_best = slope * t2r_unit / (end - first).to(tl.float32)
    for node in range(first, end):
        at = q + node * M * stride + image
        plain, soft, highest, tied, base, unit, shared = _node_sums(
            at, stride, there, 1 / tau, EMPTY, SINGLE, FAST, M, TILE_B
        )
        share = tl.zeros((TILE_B,), tl.float32)
        if R2T:
            share = slope * r2t_unit * exp(mean_weight * plain + alpha * (soft - log_sets) - outer, FAST)
        for region in tl.static_range(M):
            x = tl.load(at + region * stride, mask=there, other=0.0) * (1 / tau)
            weight = set_weight(x, base, unit, shared, FAST)
            gradient = tl.zeros((TILE_B,), tl.float32)
            if T2R:
                if SINGLE:
                    chosen = x == highest
                    if EMPTY:
                        chosen = chosen & (highest > 0.0)
                    gradient += tl.where(chosen, of_best / tied, 0.0)
                else:
                    gradient += of_best * weight
            if R2T:
                gradient += share * (alpha * weight + mean_weight)
            rounded = gradient.to(tl.float16)
            to = sent + (2 * node * M + region) * images + image
            tl.store(to, rounded, mask=there)
            tl.store(to + M * images, (gradient - rounded.to(tl.float32)).to(tl.float16), mask=there)


@triton.jit
def _node_sums(
    q,
    stride,
    there,
    inverse_tau,
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    FAST: tl.constexpr,
    M: tl.constexpr,
    TILE_B: tl.constexpr,
):
    """Of one node: Σ x, the soft maximum over the sets, the highest x, how many regions have it, and h, e^h and the
    share of its weights for `set_weight`. `nla_score.py` has the formulas.
    """
    plain = tl.zeros((TILE_B,), tl.float32)
    highest = tl.full((TILE_B,), -float("inf"), tl.float32)
    tied = tl.zeros((TILE_B,), tl.float32)
    for region in tl.static_range(M):
        x = tl.load(q + region * stride, mask=there, other=0.0) * inverse_tau
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
        x = tl.load(q + region * stride, mask=there, other=0.0) * inverse_tau
        positive += tl.maximum(x, 0.0)
        product += exp(-tl.abs(x) - base, FAST) * (1.0 + unit * product)
    soft = log_powerset(positive, product, highest, base, EMPTY)
    return plain, soft, highest, tied, base, unit, weight_unit(soft, product, highest, unit, EMPTY, FAST)


@triton.jit
def weight_unit(soft, product, highest, unit, EMPTY: tl.constexpr, FAST: tl.constexpr):
    """What all weights of a node share: 1 with ∅, without it 1/(1 − e^−L), in units of e^h."""
    if EMPTY:
        return tl.full(soft.shape, 1.0, tl.float32)
    return tl.where(highest > 0.0, 1.0 + exp(-tl.maximum(soft, -80.0), FAST), unit + 1.0 / tl.maximum(product, 1.0))


@triton.jit
def set_weight(x, base, unit, shared, FAST: tl.constexpr):
    """The derivative of the soft maximum over the sets by one region's x: σ(x) times what all weights share."""
    v = exp(-tl.abs(x) - base, FAST)
    return shared * tl.where(x > 0.0, 1.0, v) / (1.0 + unit * v)


@triton.jit
def best_set(soft, highest, EMPTY: tl.constexpr, SINGLE: tl.constexpr):
    """The best set's x: soft, or the best single region's."""
    if SINGLE:
        return tl.maximum(highest, 0.0) if EMPTY else highest
    return soft


@triton.jit
def _add_node(inner, outer, spread, FAST: tl.constexpr):
    """The running maximum over nodes and Σ exp(inner − maximum) with one more node."""
    change = exp(-tl.abs(inner - outer), FAST)
    spread = tl.where(inner > outer, spread * change + 1.0, spread + change)
    return tl.maximum(inner, outer), spread
