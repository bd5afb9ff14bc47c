"""The alignment loss of a batch, and the two ways to compute it.

`select` scores all pairs without a graph, finds the pairs that carry a gradient — the diagonal and each row's and
column's hardest — and differentiates only those: (2k+1)·C pairs instead of C². `autograd` differentiates everything
and is its reference. Values and gradients are the same.

Axes: C pairs of the batch · k negatives of each
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.contrast import contrast, hardest, off_diagonal
from powerclip.alignment.embed import Parts
from powerclip.alignment.kernels.hardest import hardest_pairs
from powerclip.alignment.score import pair_similarities, score_all, score_block, score_pairs


@dataclass(frozen=True)
class Alignment:
    """The loss, and what tells whether it is alive."""

    loss: Tensor  # carries the gradient
    violation: Tensor  # share of images whose hardest negative caption beats their own
    empty: Tensor  # share of nodes whose best set of the own image's regions is the empty one: all q ≤ 0
    positive: Tensor  # mean S̄ of the matched pairs
    negative: Tensor  # mean S̄ of each image's hardest negative


def alignment_loss(parts: Parts, config: AlignmentConfig, scale: Tensor | float | None = None) -> Alignment:
    """The loss between C images' regions and C captions' nodes; image i and caption i match.

    `scale` is the softmax's, `config.scale` unless a learned one is given.
    """
    regions, nodes, segments = parts.regions, parts.nodes, parts.segments
    count = len(regions)
    if count < 2 or count != len(segments):
        raise ValueError(f"need as many images as captions and at least 2 pairs, not {count} and {len(segments)}")
    scale = config.scale if scale is None else scale
    if config.negatives == "all":
        scores = score_all(regions, nodes, segments, config)
        positive, row, column = scores.diagonal(), off_diagonal(scores), off_diagonal(scores.T)
    else:
        k = 1 if config.negatives == "hardest" else config.k
        if config.gradient == "autograd":
            scores = score_all(regions, nodes, segments, config)
            hard_captions, hard_images = hardest(scores, k), hardest(scores.T, k)  # [C, k] each
        else:
            with torch.no_grad():
                score = functools.partial(score_block, regions, nodes, segments, config)
                hard_captions, hard_images = hardest_pairs(score, count, k)
        own = torch.arange(count, device=regions.device)
        image = torch.cat([own, own.repeat_interleave(hard_captions.shape[1]), hard_images.flatten()])
        caption = torch.cat([own, hard_captions.flatten(), own.repeat_interleave(hard_images.shape[1])])
        if config.gradient == "autograd":
            chosen = scores[image, caption]
        else:
            chosen = score_pairs(regions, nodes, segments, image, caption, config)
        positive, row, column = chosen.split([count, hard_captions.numel(), hard_images.numel()])
        row, column = row.view_as(hard_captions), column.view_as(hard_images)
    loss = contrast(positive, row, column, config, scale)

    with torch.no_grad():
        worst = row.amax(-1)
        own = torch.arange(count, device=regions.device)
        q, real = pair_similarities(regions, nodes, segments, own, own)
        return Alignment(
            loss=loss,
            violation=(worst >= positive).float().mean(),
            empty=((q.amax(-1) <= 0) & real).sum() / real.sum(),
            positive=positive.mean(),
            negative=worst.mean(),
        )
