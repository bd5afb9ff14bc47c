"""NLA scores of all pairs on a CPU, in blocks of images; the backward computes the similarities again.

Neither direction keeps anything of T × B × M, and the gradient is a closed form: `powerset_sums.py` has it. At the
quickstart's size (128 pairs, 9 nodes a caption, M = 10, D = 96), with one thread, loss and gradient take 72 ms
instead of the 110 ms of autograd through the formulas; where sets may have any size, 62 instead of 176 ms.

Each region has a tensor of its own, [T, B], and sums over regions run in Python: all of them are contiguous.

Axes: T nodes of all captions · B images · M regions · S captions · D width
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.backends import KernelSettings, unsupported_setting
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.matmul import by_region
from powerclip.alignment.ragged import Segments, segment_logsumexp, segment_mean
from powerclip.alignment.recompute import ScoreImpl, recompute

# Most similarities q of one block of images: what a CPU's caches hold.
BLOCK_ELEMENTS = 2**21
# Exponents below are raised to it. e^−85 is nothing beside the 1 that it is added to, and what is much smaller is no
# longer a normal float32 number: CPUs take ten times as long with those, and at τ = 0.001 there are many.
LOWEST = -85.0


def supports(config: AlignmentConfig) -> bool:
    """Whether these settings are the closed form that this file differentiates."""
    return config.aggregation == "nla" and unsupported_setting(config) is None


def nla_all_cpu(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """S̄ [B, S] of every image's regions [B, M, D] with every caption's nodes [T, D]."""
    impl = ScoreImpl(_forward, _gradient_block, _block_size(regions, nodes))
    return recompute(regions, nodes, segments, config, impl)


def _forward(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    blocks = regions.split(_block_size(regions, nodes))
    return torch.cat([_score_block(block, nodes, segments, config) for block in blocks])


def _block_size(regions: Tensor, nodes: Tensor) -> int:
    return max(1, BLOCK_ELEMENTS // (len(nodes) * regions.shape[1]))


def _score_block(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    settings = KernelSettings.of(config, regions.shape[1])
    x = _scaled_similarities(regions, nodes, config.tau)
    soft = _log_powerset(x, config.empty_set)
    scores: list[Tensor] = []
    if config.t2r:
        best = _best_region(x, config.empty_set) if config.largest_set else soft
        scores.append(settings.t2r_unit * segment_mean(best, segments))
    if config.r2t:
        outer = segment_logsumexp(_inner(x, soft, settings), segments)
        scores.append(settings.r2t_unit * (outer - (1 - config.alpha) * segments.lengths_like(outer).log()))
    return (config.tau * _total(scores)).T


def _gradient_block(
    regions: Tensor, nodes: Tensor, gradient: Tensor, segments: Segments, config: AlignmentConfig
) -> tuple[Tensor, Tensor]:
    """Gradients of the block's regions [B, M, D] and of the nodes [T, D] for the gradient of its scores [B, S]."""
    images, count, width = regions.shape
    settings = KernelSettings.of(config, count)
    x = _scaled_similarities(regions, nodes, config.tau)
    soft = _log_powerset(x, config.empty_set)
    weights = _weights(x, soft, config.empty_set)
    of_scores = gradient.T[segments.index]  # [T, B]
    terms = []  # of the gradient of q, [T, B] for each region
    if config.t2r:
        slope = settings.t2r_unit * of_scores / segments.lengths_like(of_scores)[segments.index]
        best = _best_region_weights(x, config.empty_set) if config.largest_set else weights
        terms.append([slope * weight for weight in best])
    if config.r2t:
        inner = _inner(x, soft, settings)
        share = _exp(inner - segment_logsumexp(inner, segments)[segments.index])
        share = settings.r2t_unit * of_scores * share
        terms.append([share * (config.alpha * weight + settings.mean_weight) for weight in weights])
    of_q = torch.stack([_total(term) for term in zip(*terms, strict=True)], 1)
    of_q = of_q.view(len(nodes), count * images)
    of_regions = (of_q.T @ nodes).view(count, images, width).transpose(0, 1)
    return of_regions, of_q @ by_region(regions)


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


def _inner(x: Sequence[Tensor], soft: Tensor, settings: KernelSettings) -> Tensor:
    """Σ_m ζ_α(x_m/2), or what replaces it without ∅: see `nla.nla_t2`."""
    return settings.mean_weight * _total(x) + settings.alpha * (soft - settings.log_sets)


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
