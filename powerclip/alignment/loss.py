"""The alignment loss of a batch, on one process or distributed over several ranks.

There are two ways to compute it. `select` scores all pairs without a graph, finds the pairs that carry a gradient — the
matched ones and each image's and each caption's hardest — and differentiates only those: (2k+1)·C pairs instead of C².
`autograd` differentiates everything and is its reference; so does `select` where that costs less. Values and gradients
are the same.

Each rank scores its own images with all captions. Nodes are gathered with their gradient; regions stay on their rank.
An image's negatives then lie in its own row of scores. A caption's lie in a column that crosses all ranks: the softmax
over all of them is a log-sum-exp over ranks; the hardest ones are scored, with their gradient, by the rank that has the
image. One process is the case of one rank: then nothing is sent, copied or padded, and there is no device sync.

Axes: c images and captions of this rank · C of all ranks · T nodes of all captions · D width · k negatives of each
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.backends import choose_backend
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.contrast import contrast, contrast_all, is_label, take_labels
from powerclip.alignment.embed import Parts
from powerclip.alignment.negatives import counts_nearly_all, find_hardest, find_semi_hard, negative_count
from powerclip.alignment.ragged import Segments
from powerclip.alignment.score import differentiates_all, pair_similarities, score_all, score_pairs
from powerclip.runtime.distributed import SINGLE, Ranks

# Most negatives of all captions that are listed with absent pairs among them: 128 MB of similarities, K = 12, M = 10.
MOST_LISTED = 2**18


@dataclass(frozen=True)
class Alignment:
    """The loss, and statistics that show whether it still learns."""

    loss: Tensor  # carries the gradient
    violation: Tensor  # share of images whose hardest negative caption beats their own
    empty: Tensor  # share of nodes whose best set of the own image's regions is the empty one: all q ≤ 0
    positive: Tensor  # mean S̄ of the matched pairs
    negative: Tensor  # mean S̄ of each image's hardest negative


class _Contrast(NamedTuple):
    loss: Tensor
    positive: Tensor  # [c] scores of the matched pairs, without a gradient, as the next one
    negative: Tensor  # [c] scores of each image's hardest negative


def alignment_loss(
    parts: Parts,
    config: AlignmentConfig,
    scale: Tensor | float | None = None,
    ranks: Ranks = SINGLE,
    k: int | None = None,
) -> Alignment:
    """The loss between C images' regions and C captions' nodes; image i and caption i match.

    `scale` is the softmax's, `config.scale` unless a learned one is given; `k` is how many negatives count at this
    step, `config.k` unless it is annealed. Where the batch is distributed over `ranks`, each has the parts of its own
    pairs and gets a loss whose mean over ranks is that of the whole batch.

    Raises:
        ValueError: fewer than two pairs in all, or not as many images as captions.
    """
    regions, segments = parts.regions, parts.segments
    count = len(regions)
    if count * ranks.count < 2 or count != len(segments):
        raise ValueError(f"need as many images as captions and at least 2 pairs, not {count} and {len(segments)}")
    scale = config.scale if scale is None else scale
    nodes, all_segments = gather_nodes(parts, ranks)
    gathered = Parts(regions, nodes, all_segments)
    if config.negatives == "all":
        result = _contrast_all(gathered, config, scale, ranks)
    else:
        result = _contrast_selected(gathered, config, scale, ranks, negative_count(config, len(all_segments), k))
    with torch.no_grad():
        image = torch.arange(count, device=regions.device)
        q, real = pair_similarities(regions, parts.nodes, segments, image, image)
        empty = ranks.sum(torch.stack([((q.amax(-1) <= 0) & real).sum(), real.sum()]))
        return Alignment(
            loss=result.loss,
            violation=(result.negative >= result.positive).float().mean(),
            empty=empty[0] / empty[1],
            positive=result.positive.mean(),
            negative=result.negative.mean(),
        )


def gather_nodes(parts: Parts, ranks: Ranks) -> tuple[Tensor, Segments]:
    """The nodes [T, D] of all captions, with gradient, and which of the C captions each belongs to."""
    if ranks.is_single:
        return parts.nodes, parts.segments
    # Both counts are known to the host: no device sync.
    sizes = ranks.numbers(len(parts.nodes), parts.segments.longest)
    counts, longest = [size[0] for size in sizes], max(size[1] for size in sizes)
    rows = ranks.gather(F.pad(parts.nodes, (0, 0, 0, max(counts) - len(parts.nodes))))
    nodes = rows if len(set(counts)) == 1 else _WithoutPadding.apply(rows, counts)
    return nodes, Segments.from_lengths(ranks.gather(parts.segments.lengths), len(nodes), longest)


class _WithoutPadding(torch.autograd.Function):
    """The first of each rank's rows side by side. Its gradient is written once, not added up from slices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        parts = rows.split(len(rows) // len(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), counts = gradients, ctx.counts
        rows = gradient.new_zeros(len(counts), max(counts), gradient.shape[1])
        for row, part in zip(rows, gradient.split(counts), strict=True):
            row[: len(part)] = part
        return rows.flatten(0, 1), None


def _contrast_all(parts: Parts, config: AlignmentConfig, scale: Tensor | float, ranks: Ranks) -> _Contrast:
    """Against all negatives; `parts` are this rank's regions and the nodes of all captions."""
    scores = score_all(parts.regions, parts.nodes, parts.segments, config)  # [c, C]
    labels = _labels(scores, ranks)
    loss = contrast_all(scores, labels, config, scale, ranks)
    scores = scores.detach()
    negative = scores.masked_fill(is_label(scores, labels), -torch.inf).amax(-1)
    return _Contrast(loss, take_labels(scores, labels), negative)


def _contrast_selected(parts: Parts, config: AlignmentConfig, scale: Tensor | float, ranks: Ranks, k: int) -> _Contrast:
    """Against k selected negatives of each image and of each caption; `parts` as above."""
    regions, nodes, segments = parts.regions, parts.nodes, parts.segments
    count, total = len(regions), len(segments)
    labels = _labels(regions, ranks)
    all_pairs = differentiates_all(regions, nodes, config, k) or counts_nearly_all(config, k, total)
    scores = score_all(regions, nodes, segments, config) if all_pairs else None

    def score_images(images: slice) -> Tensor:
        return score_all(regions[images], nodes, segments, config) if scores is None else scores[images]

    negative: Tensor | None = None
    if config.negatives == "semi_hard":
        with torch.no_grad():
            hard_captions, hard_images, negative = find_semi_hard(score_images(slice(count)), labels, ranks)
    else:
        hard_captions, hard_images = find_hardest(score_images, count, total, k, ranks)  # [c, k], [C, k]
    if scores is not None:
        positive, row = take_labels(scores, labels), scores.gather(1, hard_captions)
        column = _gather_columns(scores, hard_images, ranks)
    else:
        positive, row, column = _score_selected(parts, config, labels, hard_captions, hard_images, ranks)
    # Each of a caption's k negatives is scored by one rank: the sum over ranks has them all.
    column = ranks.sum(column)[ranks.rows(count)]
    negative = row.detach().amax(-1) if negative is None else negative
    return _Contrast(contrast(positive, row, column, config, scale), positive.detach(), negative)


def _labels(rows: Tensor, ranks: Ranks) -> Tensor:
    """The caption [c] that matches each of this rank's images, the rows of a tensor, by its number in the batch."""
    return torch.arange(len(rows), device=rows.device) + ranks.rows(len(rows)).start


def _gather_columns(scores: Tensor, hard_images: Tensor, ranks: Ranks) -> Tensor:
    """Of the scores [c, C], those of the captions with their hard images [C, k]; 0 where another rank has the image."""
    if ranks.is_single:
        return scores.T.gather(1, hard_images)
    # Indexing by the images of this rank alone would need a device sync for their number.
    local = _local_images(hard_images, len(scores), ranks)
    return torch.where(local >= 0, scores.T.gather(1, local.clamp(min=0)), 0.0)


def _local_images(images: Tensor, count: int, ranks: Ranks) -> Tensor:
    """Numbers of images in the batch as numbers on this rank, which has `count` of them; −1 for other ranks' images."""
    return torch.where(images // count == ranks.rank, images - ranks.rows(count).start, -1)


def _score_selected(
    parts: Parts, config: AlignmentConfig, labels: Tensor, hard_captions: Tensor, hard_images: Tensor, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor]:
    """S̄ of the matched pairs [c], of the images with their hard captions [c, k], of the captions with theirs [C, k].

    The last are 0 where another rank has the image.
    """
    regions, nodes, segments = parts.regions, parts.nodes, parts.segments
    (count, k), total = hard_captions.shape, len(hard_images)
    local = torch.arange(count, device=labels.device)
    image = hard_images.flatten()
    caption = torch.arange(total, device=labels.device).repeat_interleave(k)
    present: Tensor | None = None  # the positions in the list of those pairs whose image is here; None: all are listed
    if not ranks.is_single:
        image = _local_images(image, count, ranks)
        # Kernels skip absent pairs. Leaving them out of the list needs a device sync for its length.
        if choose_backend(config, regions.device) != "triton" or len(image) > MOST_LISTED:
            present = (image >= 0).nonzero().squeeze(-1)
            image, caption = image[present], caption[present]
    images = torch.cat([local, local.repeat_interleave(k), image])
    captions = torch.cat([labels, hard_captions.flatten(), caption])
    scores = score_pairs(regions, nodes, segments, images, captions, config)
    positive, row, column = scores.split([count, count * k, len(image)])
    if present is not None:
        column = column.new_zeros(total * k).index_put((present,), column)
    return positive, row.view(count, k), column.view(total, k)
