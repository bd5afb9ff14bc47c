"""What the kernels for chosen pairs, image with caption, share: the launch and the backward, in Triton.

Gathering the nodes of every chosen caption would copy them once for each pair, and summing their gradients back would
sort a million rows. Instead a program owns a pair, reads its inputs in place, and computes the score together with the
gradient of the pair's similarities; the backward only scales that. In the backward a program owns an image, or a
caption, and sums over the first PIECE pairs that contain it. Few are in many pairs: a hub may be the hardest negative
of hundreds. Its further pairs go to programs of their own, PIECE to each, and a second pass adds their sums: always the
same numbers in the same order. Most captions of other ranks are in no pair at all: their programs end at once, and do
several tiles of the width, so that there are few of them.

Axes: n chosen pairs · T nodes of all captions · K nodes of the longest one · B images · M regions · D width
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from powerclip.alignment.ragged import Segments

TILE_WIDTH = 64
SMALLEST = 16  # side of a matrix that tensor cores multiply
# Most pairs of one program of the backward. The sums of further pieces are n/PIECE times M·D, or K·D, numbers: at
# a width of 512 about as many as q, n times K·M.
PIECE = 32
TOGETHER = 32  # rows of several pairs that one product sums over
STAGES = 1  # a program that reads ahead needs all registers, and few such programs fit
OWNERS = 1024  # a program does one tile of the width for every so many owners


def run_pair_kernel(
    kernel: Any,
    regions: Tensor,
    nodes: Tensor,
    segments: Segments,
    image: Tensor,
    caption: Tensor,
    arguments: Sequence[Any],
    switches: Mapping[str, Any],
) -> Tensor:
    """Scores [n] by a kernel of images `image[i]`, regions [B, M, D], with captions `caption[i]`, nodes [T, D].

    Where `image[i]` is −1 there is no pair: the score is zero, sends no gradient, and next to no time is spent. So a
    list can have its largest possible length, without a device sync for the number of its pairs. `arguments` and
    `switches` are the kernel's.
    """
    return _PairScores.apply(
        kernel, regions.float(), nodes.float(), segments.offsets, image, caption, segments.longest, arguments, switches
    )


def tile(size: int) -> int:
    """The power of two that a tile needs to hold `size` rows."""
    return max(SMALLEST, triton.next_power_of_2(size))


class _PairScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernel: Any,
        regions: Tensor,
        nodes: Tensor,
        offsets: Tensor,
        image: Tensor,
        caption: Tensor,
        longest: int,
        arguments: Sequence[Any],
        switches: Mapping[str, Any],
    ) -> Tensor:
        regions, nodes = regions.contiguous(), nodes.contiguous()
        count, width = regions.shape[1:]
        scores = torch.zeros(len(image), device=regions.device)
        of_q = torch.zeros(len(image), longest, count, device=regions.device)
        tiles = {"TILE_K": tile(longest), "TILE_M": tile(count), "TILE_D": TILE_WIDTH}
        if len(image):
            tensors = (regions, nodes, offsets, image, caption, scores, of_q)
            kernel[(len(image),)](*tensors, longest, count, width, *arguments, **switches, **tiles)
        ctx.save_for_backward(of_q, regions, nodes, offsets, image, caption)
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_q, *inputs = ctx.saved_tensors
        return None, *pair_gradients(of_q * gradients[0].view(-1, 1, 1), *inputs), *[None] * 6


def pair_gradients(
    of_q: Tensor, regions: Tensor, nodes: Tensor, offsets: Tensor, image: Tensor, caption: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of regions [B, M, D] and nodes [T, D], given that of the chosen pairs' similarities [n, K, M]."""
    of_q = of_q.contiguous()
    longest, count, width = *of_q.shape[1:], nodes.shape[1]
    caption = torch.where(image < 0, -1, caption)
    images = _Side(image, torch.arange(len(regions) + 1, device=image.device) * count, count, 1)
    captions = _Side(caption, offsets, longest, count)
    of_regions = _sum_products(of_q, images, captions, nodes, len(regions) * count)
    of_nodes = _sum_products(of_q, captions, images, regions.view(-1, width), len(nodes))
    return of_regions.view_as(regions), of_nodes


@dataclass(frozen=True)
class _Side:
    """One of the two sides of the pairs: images with their regions, or captions with their nodes."""

    owner: Tensor  # [n] the image or the caption; −1 where there is no pair
    offsets: Tensor  # [owners + 1] where an owner's vectors begin
    longest: int  # most vectors of an owner: M or K
    stride: int  # between an owner's vectors in q


def _sum_products(of_q: Tensor, side: _Side, other: _Side, vectors: Tensor, rows: int) -> Tensor:
    """The gradient [rows, D] of one side's vectors: over its pairs, the sum of ∂q times the other side's vectors."""
    owners, width = len(side.offsets) - 1, vectors.shape[1]
    order, starts, further, extra = _pieces(side.owner, owners)
    chunks = triton.cdiv(width, TILE_WIDTH)
    sweep = max(1, min(chunks, owners // OWNERS))
    # The sums of further pieces lie behind the gradient.
    sums = torch.zeros(rows + len(extra) * side.longest, width, device=vectors.device)
    depth = triton.next_power_of_2(other.longest)
    _piece_sums[(owners + len(extra), triton.cdiv(chunks, sweep))](
        of_q,
        vectors,
        other.owner,
        other.offsets,
        side.offsets,
        order,
        starts,
        further,
        extra,
        sums,
        owners,
        rows,
        width,
        of_q.shape[1] * of_q.shape[2],
        side.longest,
        side.stride,
        other.stride,
        PIECE=PIECE,
        TILE_A=tile(side.longest),
        TILE_B=depth,
        TOGETHER=max(TOGETHER, depth),
        TILE_D=TILE_WIDTH,
        SWEEP=sweep,
        num_stages=STAGES,
    )
    if len(extra):
        sizes = {"TILE_A": tile(side.longest), "TILE_D": TILE_WIDTH}
        _add_pieces[(owners, chunks)](side.offsets, further, sums, rows, width, side.longest, **sizes)
    return sums[:rows]


def _pieces(owner: Tensor, owners: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How the pairs are divided among programs, each owner's first PIECE and each further PIECE.

    Pairs in the order of their owners [n], those of none first; where each owner's begin [owners + 1]; the number of
    its first further piece [owners + 1]; the owner of each further piece [n / PIECE], `owners` where there are fewer.
    """
    # A GPU sorts byte by byte: numbers of two bytes take a quarter of the passes.
    short = torch.int16 if owners < 2**15 else torch.int32
    ordered, order = owner.to(short).sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(owners + 1, device=owner.device, dtype=short))
    further = F.pad(((starts.diff() - 1).clamp(min=0) // PIECE).cumsum(0), (1, 0))
    pieces = torch.arange(len(owner) // PIECE, device=owner.device)
    return order, starts, further, torch.searchsorted(further, pieces, right=True) - 1


@triton.jit
def pair_tile(
    regions,
    nodes,
    image,
    first,
    length,
    count,
    width,
    TILE_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
):
    """Similarities [K, M] of an image's regions with `length` nodes from `first` on; zero beyond."""
    k, m, column = tl.arange(0, TILE_K), tl.arange(0, TILE_M), tl.arange(0, TILE_D)
    total = tl.zeros((TILE_K, TILE_M), tl.float32)
    for start in range(0, width, TILE_D):
        inside = start + column < width
        left = tl.load(
            nodes + (first + k)[:, None] * width + (start + column)[None, :],
            mask=(k < length)[:, None] & inside[None, :],
            other=0.0,
        )
        right = tl.load(
            regions + (image * count + m)[None, :] * width + (start + column)[:, None],
            mask=(m < count)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="tf32x3")
    return total


@triton.jit
def _piece_sums(
    of_q,  # [n, K, M]
    vectors,  # [others' rows, D]
    other,  # [n] whose vectors a pair multiplies
    other_offsets,  # [others + 1]
    offsets,  # [owners + 1]
    order,  # [n] pairs, those of an owner side by side
    starts,  # [owners + 1] where an owner's begin
    further,  # [owners + 1] the number of its first further piece
    extra,  # [n / PIECE] the owner of a further piece
    sums,  # [rows + n / PIECE · longest, D]
    owners,
    rows,
    width,
    pair_stride,
    longest,
    stride,
    other_stride,
    PIECE: tl.constexpr,
    TILE_A: tl.constexpr,
    TILE_B: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE_D: tl.constexpr,
    SWEEP: tl.constexpr,
):
    piece = tl.program_id(0).to(tl.int64)
    owner = piece
    if piece >= owners:
        owner = tl.load(extra + piece - owners)
    if owner == owners:
        return
    target = tl.load(offsets + owner)
    length = tl.load(offsets + owner + 1) - target
    begin = tl.load(starts + owner)
    if piece >= owners:
        target = rows + (piece - owners) * longest
        begin += (piece - owners - tl.load(further + owner) + 1) * PIECE
    end = tl.minimum(begin + PIECE, tl.load(starts + owner + 1))
    if begin >= end:
        return

    a = tl.arange(0, TILE_A)
    # Several pairs at a time: reading takes longer than multiplying, and so their reads overlap.
    nth, b = tl.arange(0, TOGETHER) // TILE_B, tl.arange(0, TOGETHER) % TILE_B
    for tile in range(SWEEP):
        column = (tl.program_id(1) * SWEEP + tile) * TILE_D + tl.arange(0, TILE_D)
        inside = column < width
        total = tl.zeros((TILE_A, TILE_D), tl.float32)
        for at in range(begin, end, TOGETHER // TILE_B):
            listed = at + nth < end
            pair = tl.load(order + at + nth, mask=listed, other=0)
            partner = tl.load(other + pair, mask=listed, other=0)
            first = tl.load(other_offsets + partner, mask=listed, other=0)
            real = b < tl.load(other_offsets + partner + 1, mask=listed, other=0) - first
            slope = tl.load(
                of_q + (pair * pair_stride + b * other_stride)[None, :] + (a * stride)[:, None],
                mask=real[None, :] & (a < length)[:, None],
                other=0.0,
            )
            vector = tl.load(
                vectors + (first + b)[:, None] * width + column[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            total = tl.dot(slope, vector, total, input_precision="tf32x3")
        offset = (target + a)[:, None] * width + column[None, :]
        tl.store(sums + offset, total, mask=(a < length)[:, None] & inside[None, :])


@triton.jit
def _add_pieces(
    offsets,  # [owners + 1]
    further,  # [owners + 1]
    sums,  # [rows + n / PIECE · longest, D]
    rows,
    width,
    longest,
    TILE_A: tl.constexpr,
    TILE_D: tl.constexpr,
):
    owner = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(further + owner), tl.load(further + owner + 1)
    if begin == end:
        return
    first = tl.load(offsets + owner)
    column = tl.program_id(1) * TILE_D + tl.arange(0, TILE_D)
    a = tl.arange(0, TILE_A)
    valid = (a < tl.load(offsets + owner + 1) - first)[:, None] & (column < width)[None, :]
    address = sums + (first + a)[:, None] * width + column[None, :]
    total = tl.load(address, mask=valid, other=0.0)
    for piece in range(begin, end):
        target = rows + piece * longest
        total += tl.load(sums + (target + a)[:, None] * width + column[None, :], mask=valid, other=0.0)
    tl.store(address, total, mask=valid)
