"""Which negatives of an image and of a caption count: the k hardest, or semi-hard ones.

An image's candidates lie in its own row of scores. A caption's lie in a column that crosses all ranks: each rank names
its best, and the rank that has the caption compares them. Scores are made and searched in blocks of images, so that
c × C of them need not be in memory.

Axes: c images of this rank · C pairs of the whole batch · n ranks · k negatives of each · R images of one block
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.contrast import is_label, take_labels
from powerclip.runtime.distributed import Ranks

# Most scores of one block of images: 64 MB.
BLOCK_ELEMENTS = 2**24


@dataclass(frozen=True)
class TopK:
    """The highest scores of each row, and their columns."""

    scores: Tensor  # [rows, k]
    columns: Tensor  # [rows, k]


def negative_count(config: AlignmentConfig, total: int, k: int | None = None) -> int:
    """How many negatives of each pair of a batch of `total` count; `k` is this step's where it is not the config's."""
    if config.negatives in ("hardest", "semi_hard"):
        return 1
    return total - 1 if config.negatives == "all" else min(config.k if k is None else k, total - 1)


def annealed_count(total: int, elapsed: float) -> int:
    """k when a share of the run is done: (C−1)^(1−elapsed), from all negatives of a batch of C pairs to one."""
    return max(1, round((total - 1) ** (1 - elapsed)))


def counts_nearly_all(config: AlignmentConfig, k: int, total: int) -> bool:
    """Whether an annealed k is so high that (2k+1)·C selected pairs cost more, in memory first, than all C²."""
    return config.anneal and k > total // 32


@torch.no_grad()
def find_hardest(
    score: Callable[[slice], Tensor], count: int, total: int, k: int, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """The captions with the k highest scores of each image here [c, k], and the images of each caption anywhere [C, k].

    Matched pairs are left out. `score` gives the scores [R, C] of a range of the `count` images here with all captions.
    """
    rows = ranks.rows(count)
    captions, images = hardest_pairs(score, range(rows.start, rows.stop), total, k)
    if ranks.is_single:
        return captions.columns, images.columns
    # Each rank compares, for its own captions, the candidates of all ranks, [c, n·k].
    scores, columns = (ranks.exchange(part).transpose(0, 1).flatten(1) for part in (images.scores, images.columns))
    return captions.columns, ranks.gather(columns.gather(1, highest(scores, k)[1]))


def hardest_pairs(score: Callable[[slice], Tensor], images: range, total: int, k: int) -> tuple[TopK, TopK]:
    """The k highest-scored captions of each image [c, k] and images of each caption [C, k], matched pairs left out.

    `images` are those here, by their numbers in the batch; where they are fewer than k, a caption gets as many.
    """
    k = min(k, total - 1)
    size = max(1, BLOCK_ELEMENTS // total)
    of_images: list[TopK] = []
    of_captions: TopK | None = None
    for start in range(0, len(images), size):
        block_images = images[start : start + size]
        block = score(slice(start, start + len(block_images))).detach()
        numbers = torch.arange(block_images.start, block_images.stop, device=block.device)
        block = block.masked_fill(is_label(block, numbers), -torch.inf)
        of_images.append(TopK(*highest(block, k)))
        of_captions = _merge(of_captions, block.T, numbers, k)
    assert of_captions is not None  # there is at least one image
    scores, columns = zip(*((part.scores, part.columns) for part in of_images), strict=True)
    return TopK(torch.cat(scores), torch.cat(columns)), of_captions


def highest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest values of each row and their columns, as `topk` gives them."""
    # For one, topk reads the row many times, and max once.
    values, index = values.max(-1, keepdim=True) if k == 1 else values.topk(k)
    return values, index


def _merge(top: TopK | None, block: Tensor, numbers: Tensor, k: int) -> TopK:
    """The k highest of `top` and of the scores [rows, R] of a block, whose columns have these numbers [R]."""
    # First the block's own highest, then those against the old ones: the block is read once and not copied.
    scores, index = highest(block, min(k, block.shape[1]))
    columns = numbers[index]
    if top is None:
        return TopK(scores, columns)
    scores, columns = torch.cat([top.scores, scores], -1), torch.cat([top.columns, columns], -1)
    scores, index = highest(scores, min(k, scores.shape[1]))
    return TopK(scores, columns.gather(-1, index))


@torch.no_grad()
def find_semi_hard(scores: Tensor, labels: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Semi-hard captions of each image here [c, 1], images of each caption anywhere [C, 1], hardest scores here [c].

    A semi-hard negative is the hardest that scores below the positive; where there is none, the hardest of all.
    `labels` [c] are the columns of the matched pairs in the scores [c, C] of this rank's images with all captions.
    """
    positive = take_labels(scores, labels)
    negatives = scores.masked_fill(is_label(scores, labels), -torch.inf)
    below = negatives.masked_fill(negatives >= positive.unsqueeze(-1), -torch.inf)
    exists = below.amax(-1, keepdim=True) > -torch.inf
    captions = torch.where(exists, below, negatives).argmax(-1, keepdim=True)
    # A caption's images lie on all ranks: each names its best below the positive, and its best of all, [C, 2].
    below = negatives.masked_fill(negatives >= ranks.gather(positive), -torch.inf)
    (low, low_image), (high, high_image) = below.max(0), negatives.max(0)
    values, images = torch.stack([low, high], 1), torch.stack([low_image, high_image], 1)
    values, rank = ranks.exchange(values).max(0)  # [c, 2]
    images = ranks.exchange(images + ranks.rows(len(scores)).start).gather(0, rank.unsqueeze(0)).squeeze(0)
    image = torch.where(values[:, 0] > -torch.inf, images[:, 0], images[:, 1])
    return captions, ranks.gather(image.unsqueeze(-1)), negatives.amax(-1)
