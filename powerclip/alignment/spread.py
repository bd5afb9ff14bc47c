"""The alignment loss of a batch that is spread over ranks: each scores its images with all captions, once.

Nodes are gathered with their gradient; regions stay where they are. An image's negatives then lie in its own row of
scores. A caption's lie in a column that crosses all ranks: the softmax over all of them is a log-sum-exp over ranks;
the hardest ones are found by each rank among its own rows, compared by the rank that owns the caption, and scored, with
their gradient, by the rank that owns the image.

Axes: c images and captions of this rank · C of all n ranks · T nodes of all captions · D width · k negatives of each
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.backends import choose
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.contrast import contrast, counts_nearly_all, highest, negative_count, semi_hard
from powerclip.alignment.embed import Parts
from powerclip.alignment.hardest import hardest_pairs
from powerclip.alignment.ragged import Segments
from powerclip.alignment.score import differentiates_all, score_all, score_pairs
from powerclip.runtime.distributed import Ranks

# Scores without a gradient are made in blocks of images: 64 MB each.
BLOCK_ELEMENTS = 2**24
# Longest list of captions' negatives on all ranks, of which only ours count: 128 MB of similarities, K = 12 and M = 10.
MOST_LISTED = 2**18


def spread_contrast(
    parts: Parts, config: AlignmentConfig, scale: Tensor | float, ranks: Ranks, k: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of the loss, and the scores [c] of its matched pairs and of each image's hardest negative."""
    nodes, segments = gather_nodes(parts, ranks)
    own = torch.arange(len(parts.regions), device=parts.regions.device)
    if config.negatives == "all":
        scores = score_all(parts.regions, nodes, segments, config)  # [c, C]
        return _against_all(scores, own + ranks.rows(len(own)).start, config, scale, ranks)
    k = negative_count(config, len(segments), k)
    return _against_hardest(Parts(parts.regions, nodes, segments), own, config, scale, ranks, k)


def gather_nodes(parts: Parts, ranks: Ranks) -> tuple[Tensor, Segments]:
    """The nodes [T, D] of all captions, with gradient, and which of the C captions each belongs to."""
    # Known to the host: neither count is asked of the GPU.
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


def _against_all(
    scores: Tensor, own: Tensor, config: AlignmentConfig, scale: Tensor | float, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor]:
    """`own` [c] are the columns of the matched pairs in the scores [c, C]."""
    count, total = scores.shape
    positive = scores.gather(1, own.unsqueeze(-1)).squeeze(-1)
    matched = own.unsqueeze(-1) == torch.arange(total, device=own.device)
    if config.loss == "triplet":
        positives = ranks.gather(positive)
        hinges = F.relu(scores - positive.unsqueeze(-1) + config.gamma) + F.relu(scores - positives + config.gamma)
        loss = hinges.masked_fill(matched, 0.0).sum() / (count * (total - 1))
    else:
        logits = scale * scores
        column = ranks.logsumexp(logits.logsumexp(0))[ranks.rows(count)]
        loss = (F.cross_entropy(logits, own) + (column - scale * positive).mean()) / 2
    return loss, positive.detach(), scores.detach().masked_fill(matched, -torch.inf).amax(-1)


def _against_hardest(
    parts: Parts, own: Tensor, config: AlignmentConfig, scale: Tensor | float, ranks: Ranks, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`parts` are this rank's regions and the nodes of all captions, `own` numbers [c] this rank's images."""
    regions, nodes, segments = parts.regions, parts.nodes, parts.segments
    count, total = len(own), len(segments)
    first = ranks.rows(count).start
    worst: Tensor | None = None
    whole = differentiates_all(regions, nodes, config, k) or counts_nearly_all(config, k, total)
    scores = score_all(regions, nodes, segments, config) if whole else None
    with torch.no_grad():
        if config.negatives == "semi_hard":
            known = score_all(regions, nodes, segments, config) if scores is None else scores
            hard_captions, hard_images, worst = find_semi_hard(known, own + first, ranks)
        else:
            hard_captions, hard_images = find_hardest(parts, config, k, ranks, scores)  # [c, k], [C, k]
        ours = hard_images // count == ranks.rank
    if scores is not None:
        # No list of the pairs that are ours: the GPU would be asked how long it is.
        positive, row = scores[own, own + first], scores.gather(1, hard_captions)
        found = scores.T.gather(1, torch.where(ours, hard_images - first, 0))
        column = torch.where(ours, found, 0.0)
    else:
        image = torch.where(ours, hard_images - first, -1).flatten()
        caption = torch.arange(total, device=own.device).repeat_interleave(k)
        # Kernels skip what is not ours. Leaving it out would ask the GPU for a number, and the host would wait.
        skips = choose(config, regions.device) == "triton" and len(image) <= MOST_LISTED
        listed = slice(None) if skips else ours.flatten().nonzero().squeeze(-1)
        images = torch.cat([own, own.repeat_interleave(k), image[listed]])
        captions = torch.cat([own + first, hard_captions.flatten(), caption[listed]])
        chosen = score_pairs(regions, nodes, segments, images, captions, config)
        positive, row = chosen[:count], chosen[count : count + count * k].view(count, k)
        column = chosen.new_zeros(len(image))
        column[listed] = chosen[count + count * k :]
        column = column.view(total, k)
    # Each place of a caption's k hardest is filled by one rank: the sum over ranks has them all.
    column = ranks.sum(column)[ranks.rows(count)]
    worst = row.detach().amax(-1) if worst is None else worst
    return contrast(positive, row, column, config, scale), positive.detach(), worst


def find_hardest(
    parts: Parts, config: AlignmentConfig, k: int, ranks: Ranks, scores: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The k highest-scored captions of each image here [c, k] and images of each caption anywhere [C, k].

    Matched pairs are left out. `scores` [c, C], where they are known already, are not computed again.
    """
    count, total = len(parts.regions), len(parts.segments)
    here = ranks.rows(count)

    def score(rows: slice, _: slice) -> Tensor:
        if scores is not None:
            return scores[rows]
        return score_all(parts.regions[rows], parts.nodes, parts.segments, config)

    # Blocks of all captions: which nodes a range of them owns, the GPU would be asked.
    rows = max(1, BLOCK_ELEMENTS // total)
    captions, images = hardest_pairs(score, range(here.start, here.stop), total, k, rows, columns=total)
    # Each rank compares, for its own captions, what all ranks have found, [c, n·k].
    best, found = (ranks.exchange(one).transpose(0, 1).flatten(1) for one in (images.scores, images.columns))
    return captions.columns, ranks.gather(found.gather(1, highest(best, k)[1]))


@torch.no_grad()
def find_semi_hard(scores: Tensor, own: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Semi-hard captions of each image here [c, 1], images of each caption anywhere [C, 1], hardest scores here [c].

    `own` [c] are the columns of the matched pairs in the scores [c, C] of this rank's images with all captions.
    """
    count, total = scores.shape
    positive = scores.gather(1, own.unsqueeze(-1)).squeeze(-1)
    matched = own.unsqueeze(-1) == torch.arange(total, device=own.device)
    captions = semi_hard(scores, positive, matched)
    # A caption's images lie on all ranks: each names its best below the positive, and its best of all, [C, 2].
    others = scores.masked_fill(matched, -torch.inf)
    below = others.masked_fill(others >= ranks.gather(positive), -torch.inf)
    (low, low_place), (high, high_place) = below.max(0), others.max(0)
    values, places = torch.stack([low, high], 1), torch.stack([low_place, high_place], 1)
    values, rank = ranks.exchange(values).max(0)  # [c, 2]
    images = ranks.exchange(places + ranks.rows(count).start).gather(0, rank.unsqueeze(0)).squeeze(0)
    image = torch.where(values[:, 0] > -torch.inf, images[:, 0], images[:, 1])
    return captions, ranks.gather(image.unsqueeze(-1)), others.amax(-1)
