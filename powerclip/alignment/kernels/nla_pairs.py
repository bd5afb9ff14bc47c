"""NLA scores of chosen pairs with their gradient, in Triton.

A pair is K nodes by M regions: its similarities never leave the program that computes them. `powerset_sums.py` has the
formulas, `pairs.py` the launch and the backward.

Axes: n chosen pairs · T nodes of all captions · K nodes of the longest one · B images · M regions · D width
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from powerclip.alignment.backends import KernelSettings
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels.pairs import pair_tile, run_pair_kernel
from powerclip.alignment.kernels.powerset_sums import (
    LN2,
    best_set,
    exp,
    log_powerset,
    powerset_product,
    set_weight,
    weight_unit,
)
from powerclip.alignment.ragged import Segments


def nla_pairs(
    regions: Tensor, nodes: Tensor, segments: Segments, image: Tensor, caption: Tensor, config: AlignmentConfig
) -> Tensor:
    """S̄ [n] of images `image[i]`, regions [B, M, D], with captions `caption[i]`, nodes [T, D]; 0 for image −1."""
    settings = KernelSettings.of(config, regions.shape[1])
    switches = {**settings.switches, "FAST": regions.is_cuda}
    return run_pair_kernel(_nla_of_pairs, regions, nodes, segments, image, caption, settings.numbers, switches)


@triton.jit
def _nla_of_pairs(
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
    FAST: tl.constexpr,
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
    x = pair_tile(regions, nodes, of_image, first, length, count, width, TILE_K, TILE_M, TILE_D) * (1 / tau)

    plain = tl.sum(tl.where(is_region, x, 0.0), 1)
    positive = tl.sum(tl.where(is_region, tl.maximum(x, 0.0), 0.0), 1)
    highest = tl.max(tl.where(is_region, x, -float("inf")), 1)
    base = tl.zeros((TILE_K,), tl.float32) if EMPTY else tl.minimum(highest, 0.0)
    away = tl.where(is_region, x, -1e30)  # padding lies so far below zero that it does not count
    unit = tl.full((TILE_K,), 1.0, tl.float32) if EMPTY else exp(base, FAST)
    product = powerset_product(away * (1.0 / LN2), base[:, None] * (1.0 / LN2), unit[:, None], FAST)
    soft = log_powerset(positive, product, highest, base, EMPTY)
    shared = weight_unit(soft, product, highest, unit, EMPTY, FAST)
    weight = set_weight(away, base[:, None], unit[:, None], shared[:, None], FAST)
    node_count = length.to(tl.float32)
    score = 0.0
    gradient = tl.zeros((TILE_K, TILE_M), tl.float32)
    if T2R:
        each = t2r_unit / node_count
        score += tau * each * tl.sum(tl.where(is_node, best_set(soft, highest, EMPTY, SINGLE), 0.0), 0)
        if SINGLE:
            is_best = is_region & (x == highest[:, None])
            if EMPTY:
                is_best = is_best & (highest > 0.0)[:, None]
            tied = tl.sum(tl.where(is_region & (x == highest[:, None]), 1.0, 0.0), 1)
            gradient += tl.where(is_best, each / tied[:, None], 0.0)
        else:
            gradient += each * weight
    if R2T:
        inner = tl.where(is_node, mean_weight * plain + alpha * (soft - log_sets), -float("inf"))
        outer = tl.max(inner, 0)
        outer += tl.log(tl.sum(exp(inner - outer, FAST), 0))
        score += tau * r2t_unit * (outer - (1.0 - alpha) * tl.log(node_count))
        share = r2t_unit * exp(inner - outer, FAST)
        gradient += share[:, None] * (alpha * weight + mean_weight)
    tl.store(scores + pair, score)
    offset = (pair * longest + k)[:, None] * count + m[None, :]
    tl.store(of_q + offset, gradient, mask=is_node[:, None] & is_region)
