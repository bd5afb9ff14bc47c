"""Similarities of chosen pairs, image with caption, and their gradient, in Triton.

Gathering the nodes of every chosen caption would copy them once for each pair, and summing their gradients back would
sort a million rows. Here a program owns a pair and reads what it needs where it lies; in the backward a program owns an
image, or a caption, and goes through the pairs that it is in, in their order: nothing is added by two programs.

Axes: n chosen pairs · T nodes of all captions · K nodes of the longest one · B images · M regions · D width
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

from powerclip.alignment.ragged import Segments

TILE_WIDTH = 64
SMALLEST = 16  # side of a matrix that tensor cores multiply


def pairs(regions: Tensor, nodes: Tensor, segments: Segments, image: Tensor, caption: Tensor) -> Tensor:
    """⟨φ_m, p_B⟩ [n, K, M] of images `image[i]`, regions [B, M, D], with captions `caption[i]`, nodes [T, D].

    Rows behind a caption's last node are zero.
    """
    offsets = F.pad(segments.lengths.cumsum(0), (1, 0))
    return _Pairs.apply(regions.float(), nodes.float(), offsets, image, caption, segments.longest)


def tile(size: int) -> int:
    """The power of two that a tile needs to hold `size` rows."""
    return max(SMALLEST, triton.next_power_of_2(size))


class _Pairs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, regions: Tensor, nodes: Tensor, offsets: Tensor, image: Tensor, caption: Tensor, longest: int
    ) -> Tensor:
        regions, nodes = regions.contiguous(), nodes.contiguous()
        ctx.save_for_backward(regions, nodes, offsets, image, caption)
        count, width = regions.shape[1:]
        q = torch.empty(len(image), longest, count, device=regions.device)
        sizes = {"TILE_K": tile(longest), "TILE_M": tile(count), "TILE_D": TILE_WIDTH}
        if len(image):
            _similarities[(len(image),)](regions, nodes, offsets, image, caption, q, longest, count, width, **sizes)
        return q

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        regions, nodes, offsets, image, caption = ctx.saved_tensors
        of_q = gradients[0].contiguous()
        longest, count, width = *of_q.shape[1:], nodes.shape[1]
        of_regions, of_nodes = torch.empty_like(regions), torch.empty_like(nodes)
        sizes = {"TILE_K": tile(longest), "TILE_M": tile(count), "TILE_D": TILE_WIDTH}
        chunks = triton.cdiv(width, TILE_WIDTH)
        common = (offsets, image, caption)
        _to_regions[(len(regions), chunks)](
            of_q, nodes, *common, *_grouped(image, len(regions)), of_regions, longest, count, width, **sizes
        )
        _to_nodes[(len(offsets) - 1, chunks)](
            of_q, regions, *common, *_grouped(caption, len(offsets) - 1), of_nodes, longest, count, width, **sizes
        )
        return of_regions, of_nodes, None, None, None, None


def _grouped(owner: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their owners [n], and where each owner's begin [owners + 1]."""
    ordered, order = owner.sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(owners + 1, device=owner.device))


@triton.jit
def _similarities(
    regions,  # [B, M, D]
    nodes,  # [T, D]
    offsets,  # [captions + 1]
    image,  # [n]
    caption,  # [n]
    q,  # [n, K, M]
    longest,
    count,
    width,
    TILE_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    of_image, of_caption = tl.load(image + pair), tl.load(caption + pair)
    first = tl.load(offsets + of_caption)
    length = tl.load(offsets + of_caption + 1) - first
    k, m, place = tl.arange(0, TILE_K), tl.arange(0, TILE_M), tl.arange(0, TILE_D)
    total = tl.zeros((TILE_K, TILE_M), tl.float32)
    for start in range(0, width, TILE_D):
        inside = start + place < width
        left = tl.load(
            nodes + (first + k)[:, None] * width + (start + place)[None, :],
            mask=(k < length)[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            regions + (of_image * count + m)[None, :] * width + (start + place)[:, None],
            mask=(m < count)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="tf32x3")
    at = (pair * longest + k)[:, None] * count + m[None, :]
    tl.store(q + at, total, mask=(k < longest)[:, None] & (m < count)[None, :])


@triton.jit
def _to_regions(
    of_q,  # [n, K, M]
    nodes,  # [T, D]
    offsets,
    image,
    caption,
    order,  # [n] pairs, those of an image side by side
    starts,  # [B + 1] where an image's begin
    of_regions,  # [B, M, D]
    longest,
    count,
    width,
    TILE_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
):
    owner = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE_D + tl.arange(0, TILE_D)
    k, m = tl.arange(0, TILE_K), tl.arange(0, TILE_M)
    inside = place < width
    total = tl.zeros((TILE_M, TILE_D), tl.float32)
    for at in range(tl.load(starts + owner), tl.load(starts + owner + 1)):
        pair = tl.load(order + at)
        of_caption = tl.load(caption + pair)
        first = tl.load(offsets + of_caption)
        real = k < tl.load(offsets + of_caption + 1) - first
        slope = tl.load(
            of_q + (pair * longest + k)[None, :] * count + m[:, None],
            mask=real[None, :] & (m < count)[:, None],
            other=0.0,
        )
        node = tl.load(
            nodes + (first + k)[:, None] * width + place[None, :], mask=real[:, None] & inside[None, :], other=0.0
        )
        total = tl.dot(slope, node, total, input_precision="tf32x3")
    where = (owner * count + m)[:, None] * width + place[None, :]
    tl.store(of_regions + where, total, mask=(m < count)[:, None] & inside[None, :])


@triton.jit
def _to_nodes(
    of_q,  # [n, K, M]
    regions,  # [B, M, D]
    offsets,
    image,
    caption,
    order,  # [n] pairs, those of a caption side by side
    starts,  # [captions + 1] where a caption's begin
    of_nodes,  # [T, D]
    longest,
    count,
    width,
    TILE_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
):
    owner = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE_D + tl.arange(0, TILE_D)
    k, m = tl.arange(0, TILE_K), tl.arange(0, TILE_M)
    inside = place < width
    first = tl.load(offsets + owner)
    real = k < tl.load(offsets + owner + 1) - first
    total = tl.zeros((TILE_K, TILE_D), tl.float32)
    for at in range(tl.load(starts + owner), tl.load(starts + owner + 1)):
        pair = tl.load(order + at)
        slope = tl.load(
            of_q + (pair * longest + k)[:, None] * count + m[None, :],
            mask=real[:, None] & (m < count)[None, :],
            other=0.0,
        )
        region = tl.load(
            regions + (tl.load(image + pair) * count + m)[:, None] * width + place[None, :],
            mask=(m < count)[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(slope, region, total, input_precision="tf32x3")
    tl.store(of_nodes + (first + k)[:, None] * width + place[None, :], total, mask=real[:, None] & inside[None, :])
