"""The alignment loss of a batch, and the two ways to compute it.

`select` scores all pairs without a graph, finds the pairs that carry a gradient — the diagonal and each row's and
column's hardest — and differentiates only those: (2k+1)·C pairs instead of C². `autograd` differentiates everything
and is its reference; so does `select` where that is the cheaper way. Values and gradients are the same.
`spread.py` has the form for a batch on several ranks.

Axes: C pairs of the batch · k negatives of each
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.contrast import contrast, counts_nearly_all, hardest, negative_count, off_diagonal
from powerclip.alignment.embed import Parts
from powerclip.alignment.hardest import hardest_pairs
from powerclip.alignment.score import differentiates_all, pair_similarities, score_all, score_block, score_pairs
from powerclip.alignment.spread import find_semi_hard, spread_contrast
from powerclip.runtime.distributed import SINGLE, Ranks


@dataclass(frozen=True)
class Alignment:
    """The loss, and what tells whether it is alive."""

    loss: Tensor  # carries the gradient
    violation: Tensor  # share of images whose hardest negative caption beats their own
    empty: Tensor  # share of nodes whose best set of the own image's regions is the empty one: all q ≤ 0
    positive: Tensor  # mean S̄ of the matched pairs
    negative: Tensor  # mean S̄ of each image's hardest negative


def alignment_loss(
    parts: Parts,
    config: AlignmentConfig,
    scale: Tensor | float | None = None,
    ranks: Ranks = SINGLE,
    k: int | None = None,
) -> Alignment:
    """The loss between C images' regions and C captions' nodes; image i and caption i match.

    `scale` is the softmax's, `config.scale` unless a learned one is given; `k` is how many negatives count at this
    step, `config.k` unless it is annealed. Where the batch is spread over `ranks`, each has the parts of its own pairs
    and gets a loss whose mean over ranks is that of the whole batch.
    """
    regions, segments = parts.regions, parts.segments
    count = len(regions)
    if count * ranks.count < 2 or count != len(segments):
        raise ValueError(f"need as many images as captions and at least 2 pairs, not {count} and {len(segments)}")
    scale = config.scale if scale is None else scale
    own = torch.arange(count, device=regions.device)
    if ranks.is_single:
        loss, positive, worst = _contrast(parts, own, config, scale, k)
    else:
        loss, positive, worst = spread_contrast(parts, config, scale, ranks, k)
    with torch.no_grad():
        q, real = pair_similarities(regions, parts.nodes, segments, own, own)
        empty = ranks.sum(torch.stack([((q.amax(-1) <= 0) & real).sum(), real.sum()]))
        return Alignment(
            loss=loss,
            violation=(worst >= positive).float().mean(),
            empty=empty[0] / empty[1],
            positive=positive.mean(),
            negative=worst.mean(),
        )


def _contrast(
    parts: Parts, own: Tensor, config: AlignmentConfig, scale: Tensor | float, k: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and the scores [C] of the matched pairs and of each image's hardest negative; `own` is 0 … C−1."""
    regions, nodes, segments = parts.regions, parts.nodes, parts.segments
    count = len(regions)
    k = negative_count(config, count, k)
    worst: Tensor | None = None
    if config.negatives == "all":
        scores = score_all(regions, nodes, segments, config)
        positive, row, column = scores.diagonal(), off_diagonal(scores), off_diagonal(scores.T)
    elif differentiates_all(regions, nodes, config, k) or counts_nearly_all(config, k, count):
        scores = score_all(regions, nodes, segments, config)
        positive = scores.diagonal()
        if config.negatives == "semi_hard":
            hard_captions, hard_images, worst = find_semi_hard(scores, own, SINGLE)
        else:
            hard_captions, hard_images = hardest(scores, k), hardest(scores.T, k)
        row, column = scores.gather(1, hard_captions), scores.T.gather(1, hard_images)
    else:
        with torch.no_grad():
            if config.negatives == "semi_hard":
                scores = score_all(regions, nodes, segments, config)
                hard_captions, hard_images, worst = find_semi_hard(scores, own, SINGLE)
            else:
                score = functools.partial(score_block, regions, nodes, segments, config)
                captions, images = hardest_pairs(score, range(count), count, k)
                hard_captions, hard_images = captions.columns, images.columns  # [C, k] each
        image = torch.cat([own, own.repeat_interleave(hard_captions.shape[1]), hard_images.flatten()])
        caption = torch.cat([own, hard_captions.flatten(), own.repeat_interleave(hard_images.shape[1])])
        chosen = score_pairs(regions, nodes, segments, image, caption, config)
        positive, row, column = chosen.split([count, hard_captions.numel(), hard_images.numel()])
        row, column = row.view_as(hard_captions), column.view_as(hard_images)
    worst = row.detach().amax(-1) if worst is None else worst
    return contrast(positive, row, column, config, scale), positive.detach(), worst
