"""Exact scores of chosen pairs with their gradient, in Triton: all 2^M sets of regions, nothing of that size in memory.

R2T is the mean over sets of the best node's sum. Its gradient is known as soon as it is: for each set the regions in it
count once for the node that won, and tied nodes share. T2R needs no sets: the best one holds all positive regions, or
is the best region. `pairs.py` has the launch and the backward.

Axes: n chosen pairs · T nodes of all captions · K nodes of the longest one · B images · M regions · D width
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
from powerclip.alignment.kernels.pairs import pair_tile, run_pair_kernel
from powerclip.alignment.ragged import Segments

TILE_SETS = 1024


def exact_pairs(
    regions: Tensor, nodes: Tensor, segments: Segments, image: Tensor, caption: Tensor, config: AlignmentConfig
) -> Tensor:
    """S̄ [n] of images `image[i]`, regions [B, M, D], with captions `caption[i]`, nodes [T, D]; 0 for image −1."""
    count = regions.shape[1]
    settings = KernelSettings.of(config, count)
    q = torch.empty(len(image), segments.longest, count, device=regions.device)
    # The empty set adds 0 to the sum over sets, so that leaving it out changes only their number.
    arguments = (q, settings.t2r_unit, settings.r2t_unit / settings.sets)
    switches = {**settings.switches, "M": count, "TILE_S": min(2**count, TILE_SETS)}
    return run_pair_kernel(_exact_of_pairs, regions, nodes, segments, image, caption, arguments, switches)


@triton.jit
def _exact_of_pairs(
    regions,  # [B, M, D]
    nodes,  # [T, D]
    offsets,  # [captions + 1]
    image,  # [n], −1 where there is no pair
    caption,  # [n]
    scores,  # [n], zero
    of_q,  # [n, K, M], zero: the gradient of a score
    longest,
    count,
    width,
    similarities,  # [n, K, M]: shared by the threads of a program
    t2r_unit,
    set_unit,  # of R2T, for each set
    EMPTY: tl.constexpr,
    SINGLE: tl.constexpr,
    T2R: tl.constexpr,
    R2T: tl.constexpr,
    M: tl.constexpr,
    TILE_S: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_D: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    of_image = tl.load(image + pair)
    if of_image < 0:
        return
    of_caption = tl.load(caption + pair)
    first = tl.load(offsets + of_caption)
    length = tl.load(offsets + of_caption + 1) - first
    k, m = tl.arange(0, TILE_K), tl.arange(0, TILE_M)
    is_node, is_region = k < length, (m < count)[None, :]
    q = pair_tile(regions, nodes, of_image, first, length, count, width, TILE_K, TILE_M, TILE_D)
    score = 0.0
    gradient = tl.zeros((TILE_K, TILE_M), tl.float32)
    if T2R:
        each = t2r_unit / length.to(tl.float32)
        highest = tl.max(tl.where(is_region, q, -float("inf")), 1)
        is_highest = is_region & (q == highest[:, None])
        of_highest = tl.where(is_highest, 1.0, 0.0) / tl.sum(tl.where(is_highest, 1.0, 0.0), 1)[:, None]
        if SINGLE:
            best, slope = highest, of_highest
        else:
            positive = is_region & (q > 0.0)
            best = tl.where(highest > 0.0, tl.sum(tl.where(positive, q, 0.0), 1), highest)
            slope = tl.where((highest > 0.0)[:, None], tl.where(positive, 1.0, 0.0), of_highest)
        if EMPTY:
            best = tl.maximum(best, 0.0)
            slope = tl.where((highest > 0.0)[:, None], slope, 0.0)
        score += each * tl.sum(tl.where(is_node, best, 0.0), 0)
        gradient += each * slope
    offset = (pair * longest + k)[:, None] * count + m[None, :]
    tl.store(of_q + offset, gradient, mask=is_node[:, None] & is_region)
    if R2T:
        tl.store(similarities + offset, q, mask=is_node[:, None] & is_region)
        tl.debug_barrier()  # each thread's sets need all similarities
        begin = pair * longest * M
        total = tl.zeros((TILE_S,), tl.float32)
        for start in range(0, 1 << M, TILE_S):
            sets = start + tl.arange(0, TILE_S)
            best_sum = _sums(similarities + begin, sets, M, TILE_S)
            tied = tl.full((TILE_S,), 1.0, tl.float32)
            for other in range(1, length):
                sums = _sums(similarities + begin + other * M, sets, M, TILE_S)
                tied = tl.where(sums > best_sum, 1.0, tl.where(sums == best_sum, tied + 1.0, tied))
                best_sum = tl.maximum(best_sum, sums)
            total += best_sum
            for other in range(length):
                won = _sums(similarities + begin + other * M, sets, M, TILE_S) == best_sum
                share = tl.where(won, set_unit / tied, 0.0)
                for region in tl.static_range(M):
                    gradient_of_region = tl.sum(tl.where((sets >> region) & 1 == 1, share, 0.0), 0)
                    # Only this program adds to these, one tile of sets after the other: the order is always the same.
                    tl.atomic_add(of_q + begin + other * M + region, gradient_of_region)
        score += set_unit * tl.sum(total, 0)
    tl.store(scores + pair, score)


@triton.jit
def _sums(q, sets, M: tl.constexpr, TILE_S: tl.constexpr):
    """Sums of one node's similarities over each of some sets."""
    total = tl.zeros((TILE_S,), tl.float32)
    for region in tl.static_range(M):
        total += tl.where((sets >> region) & 1 == 1, tl.load(q + region), 0.0)
    return total
