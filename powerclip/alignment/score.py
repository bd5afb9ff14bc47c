"""Scores of images against captions: S̄, the sum of both aggregations, for all pairs or for selected ones.

`score_all` and `score_pairs` choose the operator: this is the only place that calls the kernels.

| backend   | all pairs, NLA             | all pairs, exact                      | selected pairs             |
|-----------|----------------------------|---------------------------------------|----------------------------|
| reference | the formulas               | the formulas                          | the formulas               |
| torch     | CPU: `nla_all_cpu`,        | CPU: `exact_all_cpu`, GPU: formulas   | the formulas               |
|           | GPU: the formulas compiled |                                       |                            |
| triton    | `nla_all`                  | `exact_all`, `exact_all_grad`         | `nla_pairs`, `exact_pairs` |

Axes: C pairs of the batch · T nodes of all captions · B images · M regions · S captions · n selected pairs · D width
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from powerclip.alignment.backends import choose_backend
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.kernels import exact_all_cpu, nla_all_cpu
from powerclip.alignment.nla import nla_t1, nla_t2
from powerclip.alignment.powerset import best_node_mean, best_set_mean, exact_r2t, set_similarities
from powerclip.alignment.ragged import Rows, Segments, segment_logsumexp, segment_max, segment_mean
from powerclip.alignment.recompute import ScoreImpl, by_autograd, recompute
from powerclip.alignment.regions import inverse_set_lengths, subset_matrix

# Most elements of the largest intermediate of one block of images: 512 MB in float32.
BLOCK_ELEMENTS = 2**27
ALIGNED = 8  # images of a block, where there are as many: cuBLAS multiplies rows of odd lengths three times as slowly

# Measured on an H200, M = 10, D = 512: selected pairs take 0.5 ms and 0.14 µs each, score and gradient; the gradient of
# all pairs takes 0.02 ns for each similarity of a node with a region.
SIMILARITIES_PER_PAIR, PAIRS_AT_LEAST = 7_000, 3_500


def score_all(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """S̄ [B, S] of every image's regions [B, M, D] with every caption's nodes [T, D], in blocks of images."""
    backend = choose_backend(config, regions.device)
    if backend == "triton":
        return _score_all_triton(regions, nodes, segments, config)
    if backend == "torch" and not regions.is_cuda:
        if nla_all_cpu.supports(config):
            return nla_all_cpu.nla_all_cpu(regions, nodes, segments, config)
        if exact_all_cpu.supports(config):
            return exact_all_cpu.exact_all_cpu(regions, nodes, segments, config)
    # Exact scores are not compiled: inductor of torch 2.11 fails on 2^M.
    compiled = backend == "torch" and regions.is_cuda and config.aggregation == "nla"
    score = _compiled_score_block() if compiled else _score_block
    blocks = regions.split(_block_size(regions, nodes, config))
    return torch.cat([score(block, nodes, segments, config) for block in blocks])


def _score_all_triton(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    # Kernels are imported where they run, so that others need no Triton.
    needs_gradient = torch.is_grad_enabled() and (regions.requires_grad or nodes.requires_grad)
    if config.aggregation == "exact":
        from powerclip.alignment.kernels.exact_all import exact_all
        from powerclip.alignment.kernels.exact_all_grad import exact_all_with_gradient, supports

        if not needs_gradient:
            return exact_all(regions, nodes, segments, config)
        if supports(segments):
            return exact_all_with_gradient(regions, nodes, segments, config)
        impl = ScoreImpl(exact_all, by_autograd(_score_block), _block_size(regions, nodes, config))
        return recompute(regions, nodes, segments, config, impl)
    from powerclip.alignment.kernels.nla_all import nla_all, nla_forward_blocked

    return (nla_all if needs_gradient else nla_forward_blocked)(regions, nodes, segments, config)


def score_pairs(
    regions: Tensor, nodes: Tensor, segments: Segments, image: Tensor, caption: Tensor, config: AlignmentConfig
) -> Tensor:
    """S̄ [n] of selected pairs: image `image[i]` with caption `caption[i]`; 0 where `image[i]` is −1 (no pair)."""
    if choose_backend(config, regions.device) == "triton" and not config.divides_by_lengths:
        if config.aggregation == "exact":
            from powerclip.alignment.kernels.exact_pairs import exact_pairs as kernel
        else:
            from powerclip.alignment.kernels.nla_pairs import nla_pairs as kernel
        return kernel(regions, nodes, segments, image, caption, config)
    q, _ = pair_similarities(regions, nodes, segments, image.clamp(min=0), caption)
    rows = Rows(segments.lengths[caption], segments.longest)
    inverse: Tensor | None = None
    if config.divides_by_lengths:
        inverse = inverse_set_lengths(regions)[image.clamp(min=0)].repeat_interleave(segments.longest, 0).unsqueeze(1)
    score = aggregate(q.flatten(0, 1).unsqueeze(1), rows, config, inverse).squeeze(-1)
    # Where there is no pair, the similarities are another pair's: their score and its gradient are finite.
    return torch.where(image >= 0, score, 0.0)


def differentiates_all(regions: Tensor, nodes: Tensor, config: AlignmentConfig, k: int) -> bool:
    """Whether all pairs' scores are to be differentiated, or cost less than the matched pairs and 2k negatives each."""
    if config.gradient == "autograd":
        return True
    if choose_backend(config, regions.device) != "triton":
        return False
    if config.aggregation == "exact":
        return config.divides_by_lengths  # no kernel scores selected pairs by cosine
    from powerclip.alignment.kernels.nla_all import keeps_similarities

    images, count, _ = regions.shape
    pairs = (2 * k + 1) * images + PAIRS_AT_LEAST
    return pairs * SIMILARITIES_PER_PAIR >= images * count * len(nodes) and keeps_similarities(regions, nodes)


def pair_similarities(
    regions: Tensor, nodes: Tensor, segments: Segments, image: Tensor, caption: Tensor
) -> tuple[Tensor, Tensor]:
    """Similarities [n, K, M] of the nodes of selected captions with regions of selected images, and which are real."""
    members, real = segments.rows()
    # A product of K × D by D × M for each pair; rows beyond a caption's own nodes are computed and dropped.
    return nodes[members[caption]] @ regions[image].mT, real[caption]


def aggregate(q: Tensor, segments: Segments | Rows, config: AlignmentConfig, inverse: Tensor | None = None) -> Tensor:
    """S̄ (or Q̄ when exact) [S, B] of the similarities q [T, B, M] of nodes with single regions.

    Cosines need the inverse lengths of all sets too, [B, 2^M] or [T, B, 2^M].
    """
    if inverse is not None:
        return _aggregate_cosines(q, inverse, segments, config)
    terms = [_t2r(q, segments, config)] if config.t2r else []
    terms += [_r2t(q, segments, config)] if config.r2t else []
    return torch.stack(terms).sum(0)


def _aggregate_cosines(q: Tensor, inverse: Tensor, segments: Segments | Rows, config: AlignmentConfig) -> Tensor:
    """Q̄ [S, B] of sets by cosine: every set is enumerated for T2R too, which has no closed form."""
    of_sets = set_similarities(q, empty_set=config.empty_set)
    of_sets = of_sets * inverse[..., -of_sets.shape[-1] :]
    terms = [best_node_mean(of_sets, segments)] if config.r2t else []
    if config.t2r:
        sizes = subset_matrix(q.shape[-1], empty=config.empty_set, device=q.device).sum(-1)
        bounded = of_sets[..., sizes <= config.largest_set] if config.largest_set else of_sets
        terms += [best_set_mean(bounded, segments)]
    return torch.stack(terms).sum(0)


def _t2r(q: Tensor, segments: Segments | Rows, config: AlignmentConfig) -> Tensor:
    exact, count = config.aggregation == "exact", q.shape[-1]
    if not config.region_sets:
        best = q.amax(-1) if exact else config.tau * torch.logsumexp(q / config.tau, -1)
        return segment_mean(best, segments)
    if config.largest_set:
        # The best of the sets of at most s regions has a closed form as well: the s highest that are positive.
        count = min(count, config.largest_set)
        q, exact = q.amax(-1, keepdim=True) if count == 1 else q.topk(count).values, True
    # Corollary 1: with relu NLA-T1 is exact, so enumeration is never needed here.
    score = nla_t1(q, segments, config.tau, "relu" if exact else config.t1, empty_set=config.empty_set)
    return score / count if config.similarity == "mean" else score


def _r2t(q: Tensor, segments: Segments | Rows, config: AlignmentConfig) -> Tensor:
    exact = config.aggregation == "exact"
    if not config.region_sets:
        best = segment_max(q, segments) if exact else config.tau * segment_logsumexp(q / config.tau, segments)
        return best.mean(-1)
    if exact:
        score = exact_r2t(q, segments, empty_set=config.empty_set)
    else:
        score = nla_t2(q, segments, config.tau, config.alpha, config.t2, empty_set=config.empty_set)
    return score / q.shape[-1] if config.similarity == "mean" else score


def _score_block(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    images, count, width = regions.shape
    q = (nodes @ regions.reshape(-1, width).T).view(len(nodes), images, count)
    inverse = inverse_set_lengths(regions) if config.divides_by_lengths else None
    return aggregate(q, segments, config, inverse).T


def _block_size(regions: Tensor, nodes: Tensor, config: AlignmentConfig) -> int:
    count = regions.shape[1]
    per_image = len(nodes) * (2**count if config.aggregation == "exact" and config.region_sets else count)
    size = max(1, BLOCK_ELEMENTS // per_image)
    return size if size < ALIGNED else size - size % ALIGNED


@functools.cache
def _compiled_score_block() -> Callable[..., Tensor]:
    """`_score_block` compiled: the number of nodes changes from batch to batch, and dozens of passes become two."""
    # Scores are float32 on purpose: inductor's advice to use TensorFloat32 does not apply.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    return torch.compile(_score_block, dynamic=True)
