"""NLA scores of all pairs with a gradient that recomputes the similarities, block of images by block, in plain torch.

The backward computes the similarities of a block again, and their gradient in closed form. With x = q/τ, P the log of
the sum over the sets of exp Σ_A x, s_k the softmax over a caption's nodes and G the gradient of its score,

    ∂/∂q_m = G · ((1/K + α·s_k) · w_m + s_k · (1−α) · c),    w_m = ∂P/∂x_m,    c = 2^(M−1) / number of sets

and w_m is σ(x_m) with the empty set; without it σ(x_m) / (1 − e^−L), or softmax(x)_m where all are far below zero. When
a phrase's best set is a single region (largest_set: 1), 1/K goes to the highest q instead.

Each region has a tensor of its own, [T, B], and sums over regions run in Python: compiled, all regions of a node and
image are read once and meet in registers.

Axes: T nodes of all captions · B images · M regions · S captions · D width
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels.recompute import Scorer, Way, recompute
from powerclip.alignment.ragged import Segments, segment_logsumexp, segment_mean

# Most similarities q of one block of images: on a GPU 512 MB, on a CPU what its caches hold.
BLOCK_ELEMENTS = {"cuda": 2**27, "cpu": 2**21}
# Exponents below are raised to it. e^−85 is nothing beside the 1 that it is added to, and what is much smaller is no
# longer a normal float32 number: CPUs take ten times as long with those, and at τ = 0.001 there are many.
LOWEST = -85.0


def supports(config: AlignmentConfig) -> bool:
    """Whether these settings are the closed form that this file differentiates."""
    return (
        config.aggregation == "nla"
        and config.region_sets
        and (not config.t2r or config.largest_set == 1 or (config.t1 == "softplus" and not config.largest_set))
        and (not config.r2t or config.t2 == "tanh")
    )


def nla_recompute(
    regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig, forward: Scorer | None = None
) -> Tensor:
    """S̄ [B, S] of every image's regions [B, M, D] with every caption's nodes [T, D]; `forward` may score faster."""
    differentiate = _compiled(_gradient_block) if regions.is_cuda else _gradient_block
    way = Way(forward or _forward, differentiate, _block_size(regions, nodes))
    return recompute(regions, nodes, segments, config, way)


def _forward(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    score_block = _compiled(_score_block) if regions.is_cuda else _score_block
    blocks = regions.split(_block_size(regions, nodes))
    return torch.cat([score_block(block, nodes, segments, config) for block in blocks])


def _block_size(regions: Tensor, nodes: Tensor) -> int:
    return max(1, BLOCK_ELEMENTS.get(regions.device.type, BLOCK_ELEMENTS["cpu"]) // (len(nodes) * regions.shape[1]))


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once: the number of nodes changes from batch to batch."""
    return torch.compile(function, dynamic=True)


def _score_block(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    x = _scaled_similarities(regions, nodes, config.tau)
    soft = _log_powerset(x, config.empty_set)
    scores: list[Tensor] = []
    if config.t2r:
        best = _best_region(x, config.empty_set) if config.largest_set else soft
        scores.append(_t2r_unit(regions, config) * segment_mean(best, segments))
    if config.r2t:
        outer = segment_logsumexp(_inner(x, soft, config), segments)
        scores.append(_r2t_unit(regions, config) * (outer - (1 - config.alpha) * segments.lengths_like(outer).log()))
    return (config.tau * _total(scores)).T


def _gradient_block(
    regions: Tensor, nodes: Tensor, gradient: Tensor, segments: Segments, config: AlignmentConfig
) -> tuple[Tensor, Tensor]:
    """Gradients of the block's regions [B, M, D] and of the nodes [T, D] for the gradient of its scores [B, S]."""
    images, count, width = regions.shape
    x = _scaled_similarities(regions, nodes, config.tau)
    soft = _log_powerset(x, config.empty_set)
    weights = _weights(x, soft, config.empty_set)
    given = gradient.T[segments.index]  # [T, B]
    terms = []  # of the gradient of q, [T, B] for each region
    if config.t2r:
        slope = _t2r_unit(regions, config) * given / segments.lengths_like(given)[segments.index]
        best = _best_region_weights(x, config.empty_set) if config.largest_set else weights
        terms.append([slope * weight for weight in best])
    if config.r2t:
        inner = _inner(x, soft, config)
        share = _exp(inner - segment_logsumexp(inner, segments)[segments.index])
        share = _r2t_unit(regions, config) * given * share
        constant = (1 - config.alpha) * _mean_weight(count, config.empty_set)
        terms.append([share * (config.alpha * weight + constant) for weight in weights])
    of_q = torch.stack([_total(term) for term in zip(*terms, strict=True)], 1)
    of_q = of_q.view(len(nodes), count * images)
    of_regions = (of_q.T @ nodes).view(count, images, width).transpose(0, 1)
    return of_regions, of_q @ _by_region(regions)


def _by_region(regions: Tensor) -> Tensor:
    """Regions as rows [M·B, D], images of the same region side by side."""
    return regions.transpose(0, 1).reshape(-1, regions.shape[-1])


def _scaled_similarities(regions: Tensor, nodes: Tensor, tau: float) -> Sequence[Tensor]:
    """x_m = q_m/τ, [T, B] for each of the M regions."""
    # A product for each region: its result is contiguous, a slice of one large product is not.
    return [(nodes @ region.T) / tau for region in regions.unbind(1)]


def _total(values: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, values)


def _exp(x: Tensor) -> Tensor:
    """exp x, or 1e-37 where it is smaller."""
    return torch.exp(x.clamp(min=LOWEST))


def _highest(x: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.maximum, x)


def _far(highest: Tensor) -> Tensor:
    """Where sets of two regions no longer count beside single ones: `log_powerset` has the reason."""
    return highest < math.log(torch.finfo(highest.dtype).eps)


def _log_powerset(x: Sequence[Tensor], empty_set: bool) -> Tensor:
    """`nla.log_powerset` over a sequence of regions instead of the last axis."""
    total = _total([F.softplus(value.clamp(min=LOWEST)) for value in x])
    if empty_set:
        return total
    highest = _highest(x)
    singles = highest + _total([_exp(value - highest) for value in x]).log()
    far = _far(highest)
    return torch.where(far, singles, total + torch.log(-torch.expm1(-torch.where(far, 1.0, total))))


def _weights(x: Sequence[Tensor], soft: Tensor, empty_set: bool) -> list[Tensor]:
    """w_m = ∂ log_powerset / ∂ x_m for each region."""
    if empty_set:
        return [torch.sigmoid(value) for value in x]
    far = _far(_highest(x))
    # σ(x)/(1 − e^−L) = σ(x)·(1 + e^−soft), for e^soft = e^L − 1; and single regions' share is exp(x − soft).
    scale = 1 + _exp(-torch.where(far, 0.0, soft))
    return [torch.where(far, _exp(value - soft), torch.sigmoid(value) * scale) for value in x]


def _inner(x: Sequence[Tensor], soft: Tensor, config: AlignmentConfig) -> Tensor:
    """Σ_m ζ_α(x_m/2), or what replaces it without ∅: see `nla.nla_t2`."""
    sets = 2 ** len(x) - (0 if config.empty_set else 1)
    mean = _mean_weight(len(x), config.empty_set) * _total(x)
    return (1 - config.alpha) * mean + config.alpha * (soft - math.log(sets))


def _mean_weight(count: int, empty_set: bool) -> float:
    """The share of the sets that a region is in."""
    return 2 ** (count - 1) / (2**count - (0 if empty_set else 1))


def _best_region(x: Sequence[Tensor], empty_set: bool) -> Tensor:
    """The best set of at most one region."""
    return F.relu(_highest(x)) if empty_set else _highest(x)


def _best_region_weights(x: Sequence[Tensor], empty_set: bool) -> list[Tensor]:
    """∂ `_best_region` / ∂ x_m for each region; tied ones share it."""
    highest = _highest(x)
    tied = [(value == highest).to(value.dtype) for value in x]
    share = 1 / _total(tied)
    if empty_set:
        share = torch.where(highest > 0, share, 0.0)
    return [share * one for one in tied]


def _r2t_unit(regions: Tensor, config: AlignmentConfig) -> float:
    """What R2T is multiplied with: a mean over the regions, or their sum."""
    return 1 / regions.shape[1] if config.similarity == "mean" else 1.0


def _t2r_unit(regions: Tensor, config: AlignmentConfig) -> float:
    """The same for T2R, whose sets may be bounded."""
    return 1.0 if config.largest_set else _r2t_unit(regions, config)
