"""SAM's mask decoder for many points at once, in Triton: what is computed at every cell of the image for every point.

The plain decoder keeps 2 MB a point for each of some forty steps; here an image's cells pass through a point's layer in
registers. Three identities take the projections off the cells x. With a head's W_q, W_k, W_v, W_o and its tokens t:

    ⟨W_q x, W_k t⟩ = ⟨x, W_qᵀ W_k t⟩      Σ_x p_x W_v x = W_v Σ_x p_x x      W_o Σ_t a_t W_v t = Σ_t a_t (W_o W_v t)

so a token becomes, for each head, a vector as wide as the image's features, a *slot*: 8 heads × 8 tokens = 64 slots.
Scores are in units of log 2: powers of 2 are what a GPU computes.

Axes: B images · n points of all images, image by image · S cells of the image grid, row by row · D width ·
J slots, head by head · K masks of a point · W rows of 16 for K
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS, TOKENS = 8, 8
SLOTS = HEADS * TOKENS
ROWS = 16  # of a point's masks, padded to what a tensor core takes
# Cells at once: a tensor core of four warps takes 64 rows; their features in float32 are 128 registers of each thread.
TILE, WARPS = 64, 4
UPDATE_TILES = 16  # tiles that a program updates with the slots that it has loaded


@dataclass(frozen=True)
class Update:
    """How a layer changes the image's cells."""

    keys: Tensor  # [n, J, D]
    bias: Tensor  # [n, J] float32; -inf for a slot that is not used
    values: Tensor  # [n, J, D]
    value_bias: Tensor  # [D] float32
    norm_weight: Tensor  # [D] float32
    norm_bias: Tensor  # [D] float32
    eps: float


def update(image: Tensor, positions: Tensor, by: Update) -> Tensor:
    """Cells [n, S, D] = LayerNorm(x + Σ_j softmax_t(⟨x + position, key_j⟩ + bias_j) value_j + value_bias).

    Args:
        image: x [B, S, D], the same for all points of an image, or [n, S, D]; S is a multiple of `TILE`.
        positions: [S, D].
        by: the layer's slots for each point; the softmax of a cell is over the tokens of one head.
    """
    count, cells, width = len(by.keys), image.shape[1], image.shape[2]
    if cells % TILE or image.shape[1:] != positions.shape:
        raise ValueError(f"{cells} cells with positions {list(positions.shape)}: not whole tiles of {TILE}")
    updated = torch.empty(count, cells, width, dtype=image.dtype, device=image.device)
    parts = max(1, cells // TILE // UPDATE_TILES)
    _update[(count, parts)](
        image,
        positions,
        by.keys,
        by.bias,
        by.values,
        by.value_bias,
        by.norm_weight,
        by.norm_bias,
        updated,
        cells,
        count // len(image),
        cells // parts,
        by.eps,
        D=width,
        H=HEADS,
        T=TOKENS,
        TILE_S=TILE,
        num_warps=WARPS,
        num_stages=1,
    )
    return updated


@triton.jit
def _update(
    image,  # [B or n, S, D]
    positions,  # [S, D]
    keys,  # [n, J, D]
    bias,  # [n, J]
    values,  # [n, J, D]
    value_bias,  # [D]
    norm_weight,
    norm_bias,
    updated,  # [n, S, D]
    cells,
    points,  # of an image that is the same for all of them, else 1
    part,  # cells that a program updates
    eps,
    D: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    TILE_S: tl.constexpr,
):
    point = tl.program_id(0).to(tl.int64)
    wide = tl.arange(0, D)
    slot = tl.arange(0, H * T)
    of_slots = point * (H * T * D) + slot[:, None] * D + wide[None, :]
    key, value = tl.load(keys + of_slots), tl.load(values + of_slots)
    key_bias = tl.load(bias + point * (H * T) + slot)
    source = image + (point // points) * cells * D
    target = updated + point * cells * D
    start = tl.program_id(1) * part
    for first in range(start, start + part, TILE_S):
        at = (first + tl.arange(0, TILE_S))[:, None] * D + wide[None, :]
        x = tl.load(source + at)
        scores = tl.dot(x + tl.load(positions + at), tl.trans(key)) + key_bias[None, :]
        scores = tl.reshape(scores, (TILE_S, H, T))
        powers = tl.exp2(scores - tl.max(scores, 2, keep_dims=True))
        shares = tl.reshape(powers / tl.sum(powers, 2, keep_dims=True), (TILE_S, H * T))
        # Vectors are loaded anew for each tile: they would take a hundred registers.
        y = x.to(tl.float32) + tl.dot(shares.to(x.dtype), value) + tl.load(value_bias + wide)[None, :]
        y -= (tl.sum(y, 1) / D)[:, None]
        y *= tl.rsqrt(tl.sum(y * y, 1) / D + eps)[:, None]
        y = y * tl.load(norm_weight + wide)[None, :] + tl.load(norm_bias + wide)[None, :]
        tl.store(target + at, y.to(x.dtype))


def attend(image: Tensor, positions: Tensor, queries: Tensor) -> Tensor:
    """What slots read of the cells of their point's image, [n, J, D] = Σ_s softmax_s(⟨x + position, query_j⟩) x.

    Args:
        image: x [n, S, D]; S is a multiple of `TILE`.
        positions: [S, D].
        queries: [n, J, D].
    """
    count, cells, width = image.shape
    attended = torch.empty_like(queries)
    _attend[(count,)](
        image,
        positions,
        queries,
        attended,
        cells,
        D=width,
        J=SLOTS,
        TILE_S=TILE,
        num_warps=WARPS,
        num_stages=1,
    )
    return attended


@triton.jit
def _attend(
    image,  # [n, S, D]
    positions,  # [S, D]
    queries,  # [n, J, D]
    attended,  # [n, J, D]
    cells,
    D: tl.constexpr,
    J: tl.constexpr,
    TILE_S: tl.constexpr,
):
    point = tl.program_id(0).to(tl.int64)
    wide = tl.arange(0, D)
    of_slots = point * (J * D) + tl.arange(0, J)[:, None] * D + wide[None, :]
    query = tl.load(queries + of_slots)
    highest = tl.full((J,), -float("inf"), tl.float32)
    total = tl.zeros((J,), tl.float32)
    sums = tl.zeros((J, D), tl.float32)
    for first in range(0, cells, TILE_S):
        at = (first + tl.arange(0, TILE_S))[:, None] * D + wide[None, :]
        x = tl.load(image + point * cells * D + at)
        scores = tl.dot(query, tl.trans(x + tl.load(positions + at)))  # [J, TILE_S]
        higher = tl.maximum(highest, tl.max(scores, 1))
        powers = tl.exp2(scores - higher[:, None])
        smaller = tl.exp2(highest - higher)
        total = total * smaller + tl.sum(powers, 1)
        sums = sums * smaller[:, None] + tl.dot(powers.to(x.dtype), x)
        highest = higher
    tl.store(attended + of_slots, (sums / total[:, None]).to(attended.dtype.element_ty))


@dataclass(frozen=True)
class Upscaling:
    """From a cell's features to those of the 16 fine cells in it, in two steps of 2 × 2."""

    first: Tensor  # [4, D, D/4], the quarters row by row
    first_bias: Tensor  # [D/4] float32
    norm_weight: Tensor  # [D/4] float32
    norm_bias: Tensor  # [D/4] float32
    eps: float
    second: Tensor  # [D/4, 4·D/8], the quarters of a quarter row by row
    second_bias: Tensor  # [4·D/8] float32


def draw(
    image: Tensor,
    wanted: Tensor,
    kernels: Tensor,
    upscaling: Upscaling,
    extent: Tensor,
    columns: int,
    details: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Masks: words [n, K, S] of 16 bits, one for each fine cell of a cell, and counts [n, K, 3] of fine cells whose
    logit is above 0, 1 and -1. Only what lies in the image counts.

    Args:
        image: cells [n, S, D].
        wanted: [n] points to draw; the words of others are left as they are in memory, their counts are 0.
        kernels: [n, K, D/8] what each mask multiplies the finest features with.
        upscaling: the way there.
        extent: [B, 2] fine rows and columns that lie in each image, int32.
        columns: of the image grid.
        details: features that are added on the way [B, S, 4, D/4] and [B, S, 16, D/8], as SAM 2 does.
    """
    count, cells, width = image.shape
    masks = kernels.shape[1]
    padded = torch.zeros(count, ROWS, width // 8, dtype=image.dtype, device=image.device)
    padded[:, :masks] = kernels
    words = torch.empty(count, masks, cells, dtype=torch.int16, device=image.device)
    counts = torch.empty(count, 3, ROWS, dtype=torch.int32, device=image.device)
    _draw[(count,)](
        image,
        wanted.to(torch.int32),
        padded,
        upscaling.first,
        upscaling.first_bias,
        upscaling.norm_weight,
        upscaling.norm_bias,
        upscaling.second,
        upscaling.second_bias,
        extent,
        details[0] if details else image,
        details[1] if details else image,
        words,
        counts,
        cells,
        columns,
        count // len(extent),
        masks,
        upscaling.eps,
        D=width,
        ROWS_W=ROWS,
        DETAILS=details is not None,
        TILE_S=TILE,
        num_warps=WARPS,
        num_stages=1,
    )
    return words, counts[:, :, :masks].transpose(1, 2)


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _draw(
    image,  # [n, S, D]
    wanted,  # [n] int32
    kernels,  # [n, W, D/8]
    first_weight,  # [4, D, D/4]
    first_bias,  # [D/4]
    norm_weight,
    norm_bias,
    second_weight,  # [D/4, D/2]
    second_bias,  # [D/2]
    extent,  # [B, 2]
    coarse_details,  # [B, S, 4, D/4]
    fine_details,  # [B, S, 16, D/8]
    words,  # [n, K, S]
    counts,  # [n, 3, W]
    cells,
    columns,
    points,
    masks,
    eps,
    D: tl.constexpr,
    ROWS_W: tl.constexpr,
    DETAILS: tl.constexpr,
    TILE_S: tl.constexpr,
):
    E: tl.constexpr = D // 4
    F: tl.constexpr = D // 8
    point = tl.program_id(0).to(tl.int64)
    owner = point // points
    wide, narrow, row = tl.arange(0, D), tl.arange(0, E), tl.arange(0, ROWS_W)
    fine = tl.arange(0, F)
    kernel = tl.trans(tl.load(kernels + point * ROWS_W * F + row[:, None] * F + fine[None, :]))
    of_second = narrow[:, None] * (4 * F) + fine[None, :]
    bias_one = tl.load(first_bias + narrow)
    weight, shift = tl.load(norm_weight + narrow), tl.load(norm_bias + narrow)
    rows_inside, columns_inside = tl.load(extent + owner * 2), tl.load(extent + owner * 2 + 1)
    of_first = wide[:, None] * E + narrow[None, :]
    above = tl.zeros((TILE_S, ROWS_W), tl.int32)
    tight = tl.zeros((TILE_S, ROWS_W), tl.int32)
    loose = tl.zeros((TILE_S, ROWS_W), tl.int32)
    stop = tl.where(tl.load(wanted + point) != 0, cells, 0)
    for begin in range(0, stop, TILE_S):
        cell = begin + tl.arange(0, TILE_S)
        x = tl.load(image + point * cells * D + cell[:, None] * D + wide[None, :])
        word = tl.zeros((TILE_S, ROWS_W), tl.int32)
        for quarter in range(4):
            h = tl.dot(x, tl.load(first_weight + quarter * D * E + of_first)) + bias_one[None, :]
            if DETAILS:
                finer = ((owner * cells + cell) * 4 + quarter)[:, None] * E + narrow[None, :]
                h += tl.load(coarse_details + finer).to(tl.float32)
            h -= (tl.sum(h, 1) / E)[:, None]
            h *= tl.rsqrt(tl.sum(h * h, 1) / E + eps)[:, None]
            h = _gelu(h * weight[None, :] + shift[None, :])
            h = h.to(x.dtype)
            for part in range(4):
                g = tl.dot(h, tl.load(second_weight + part * F + of_second)) + tl.load(second_bias + fine)[None, :]
                if DETAILS:
                    finest = ((owner * cells + cell) * 16 + quarter * 4 + part)[:, None] * F + fine[None, :]
                    g += tl.load(fine_details + finest).to(tl.float32)
                logits = tl.dot(_gelu(g).to(x.dtype), kernel)
                down = cell // columns * 4 + (quarter // 2) * 2 + part // 2
                across = cell % columns * 4 + (quarter % 2) * 2 + part % 2
                inside = ((down < rows_inside) & (across < columns_inside))[:, None]
                drawn = ((logits > 0.0) & inside).to(tl.int32)
                word += drawn << (quarter * 4 + part)
                above += drawn
                tight += ((logits > 1.0) & inside).to(tl.int32)
                loose += ((logits > -1.0) & inside).to(tl.int32)
        at = (point * masks + row)[None, :] * cells + cell[:, None]
        tl.store(words + at, word.to(tl.int16), mask=(row < masks)[None, :] & (cell < cells)[:, None])
    to = counts + point * (3 * ROWS_W) + row
    tl.store(to, tl.sum(above, 0))
    tl.store(to + ROWS_W, tl.sum(tight, 0))
    tl.store(to + 2 * ROWS_W, tl.sum(loose, 0))


def keep_distinct(overlaps: Tensor, counts: Tensor, most: int) -> Tensor:
    """Which [B, T] of each image's first `counts` masks overlap no earlier one that is kept, at most `most`.

    Args:
        overlaps: [B, T, T] bool.
        counts: [B] int32.
        most: masks of an image.
    """
    images, size = overlaps.shape[:2]
    kept = torch.empty(images, size, dtype=torch.bool, device=overlaps.device)
    _keep_distinct[(images,)](
        overlaps.view(torch.uint8), counts, kept.view(torch.uint8), size, most, TILE_T=triton.next_power_of_2(size)
    )
    return kept


@triton.jit
def _keep_distinct(
    overlaps,  # [B, T, T] uint8
    counts,  # [B] int32
    kept,  # [B, T] uint8
    size,
    most,
    TILE_T: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE_T)
    count = tl.load(counts + image)
    is_open = (at < count).to(tl.int32)
    chosen = tl.zeros((TILE_T,), tl.int32)
    number = 0
    for mask in range(0, count):
        here = (at == mask).to(tl.int32)
        take = (tl.sum(is_open * here, 0) > 0) & (number < most)
        same = tl.load(overlaps + (image * size + mask) * size + at, mask=at < size, other=0).to(tl.int32)
        is_open = tl.where(take, is_open * (1 - same), is_open)
        chosen = tl.where(take, chosen + here, chosen)
        number += take.to(tl.int32)
    tl.store(kept + image * size + at, chosen.to(tl.uint8), mask=at < size)
