"""Scores of images against captions: S̄, the sum of both aggregations, for all pairs or for chosen ones.

Axes: C pairs of the batch · T nodes of all captions · B images · M regions · S captions · n chosen pairs · D width
"""

from __future__ import annotations

import torch
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.nla import nla_t1, nla_t2
from powerclip.alignment.powerset import exact_r2t
from powerclip.alignment.ragged import Segments, segment_logsumexp, segment_max, segment_mean

# Most elements of the largest intermediate of one block of images: 256 MB in float32.
BLOCK_ELEMENTS = 2**26


def aggregate(q: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """S̄ (or Q̄ when exact) [S, B] of the similarities q [T, B, M] of nodes with single regions."""
    score: Tensor | float = 0.0
    if config.t2r:
        score = score + _t2r(q, segments, config)
    if config.r2t:
        score = score + _r2t(q, segments, config)
    assert isinstance(score, Tensor)  # the config has at least one of the two
    # The mean of a set's members in place of their sum; single regions are not summed in the first place.
    return score / q.shape[-1] if config.similarity == "mean" and config.region_sets else score


def _t2r(q: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    exact = config.aggregation == "exact"
    if config.region_sets:
        # Corollary 1: with relu NLA-T1 is exact, so enumeration is never needed here.
        return nla_t1(q, segments, config.tau, "relu" if exact else config.t1, empty_set=config.empty_set)
    best = q.amax(-1) if exact else config.tau * torch.logsumexp(q / config.tau, -1)
    return segment_mean(best, segments)


def _r2t(q: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    exact = config.aggregation == "exact"
    if config.region_sets and exact:
        return exact_r2t(q, segments, empty_set=config.empty_set)
    if config.region_sets:
        return nla_t2(q, segments, config.tau, config.alpha, config.t2, empty_set=config.empty_set)
    best = segment_max(q, segments) if exact else config.tau * segment_logsumexp(q / config.tau, segments)
    return best.mean(-1)


def score_all(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> Tensor:
    """S̄ [B, S] of every image's regions [B, M, D] with every caption's nodes [T, D], in blocks of images."""
    _, count, width = regions.shape
    per_image = len(nodes) * (2**count if config.aggregation == "exact" and config.region_sets else count)
    block = max(1, BLOCK_ELEMENTS // per_image)
    scores = []
    for part in regions.split(block):
        q = (nodes @ part.reshape(-1, width).T).view(len(nodes), len(part), count)
        scores.append(aggregate(q, segments, config).T)
    return torch.cat(scores)


def score_pairs(
    regions: Tensor,
    nodes: Tensor,
    segments: Segments,
    image: Tensor,
    caption: Tensor,
    config: AlignmentConfig,
) -> Tensor:
    """S̄ [n] of chosen pairs: image `image[i]` with caption `caption[i]`."""
    q, pairs = pair_similarities(regions, nodes, segments, image, caption)
    return aggregate(q, pairs, config).squeeze(-1)


def pair_similarities(
    regions: Tensor, nodes: Tensor, segments: Segments, image: Tensor, caption: Tensor
) -> tuple[Tensor, Segments]:
    """The similarities [Σ K, 1, M] of the nodes of chosen captions with the regions of chosen images."""
    lengths = segments.lengths[caption]
    place = torch.arange(int(segments.lengths.max()), device=nodes.device)
    first = segments.lengths.cumsum(0) - segments.lengths
    # A product of M × D by D × K for each pair; rows beyond a caption's own nodes are computed and dropped.
    member = place < lengths.unsqueeze(-1)  # [n, K]
    node = torch.where(member, first[caption].unsqueeze(-1) + place, 0)
    q = nodes[node] @ regions[image].mT  # [n, K, M]
    return q[member].unsqueeze(1), Segments.from_lengths(lengths)
