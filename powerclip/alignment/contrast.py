"""Contrasting the matched pairs with the mismatched ones: which negatives count, and how much (Φγ or a softmax).

Axes: C pairs of the batch · k negatives of each
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig


def triplet(positive: Tensor, negatives: Tensor, gamma: float) -> Tensor:
    """Φγ for one direction: the mean hinge of the negatives [C, k] against the positives [C]; the paper's has k = 1."""
    return F.relu(negatives - positive.unsqueeze(-1) + gamma).mean()


def softmax(positive: Tensor, negatives: Tensor, scale: Tensor | float) -> Tensor:
    """Cross-entropy of the positive [C] among itself and its negatives [C, k], at a scale (1/temperature)."""
    logits = scale * torch.cat([positive.unsqueeze(-1), negatives], -1)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def off_diagonal(scores: Tensor) -> Tensor:
    """The negatives of each row of a square matrix: [C, C] → [C, C−1]."""
    size = len(scores)
    return scores.flatten()[1:].view(size - 1, size + 1)[:, :-1].reshape(size, size - 1)


def highest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest values of each row, and where they stand, as `topk` gives them."""
    # For one, topk reads the row many times, and max once.
    values, index = values.max(-1, keepdim=True) if k == 1 else values.topk(k)
    return values, index


def hardest(scores: Tensor, k: int) -> Tensor:
    """Columns [C, k] of each row's k highest scores off the diagonal."""
    size = len(scores)
    _, index = highest(off_diagonal(scores), min(k, size - 1))
    # Back from columns that skip the diagonal to columns of the matrix.
    return index + (index >= torch.arange(size, device=scores.device).unsqueeze(-1))


def semi_hard(scores: Tensor, positive: Tensor, matched: Tensor) -> Tensor:
    """Columns [R, 1] of each row's hardest negative that scores below its positive [R]; of its hardest where none does.

    `matched` [R, Q] says which of the scores [R, Q] are no negatives.
    """
    others = scores.masked_fill(matched, -torch.inf)
    below = others.masked_fill(others >= positive.unsqueeze(-1), -torch.inf)
    some = below.amax(-1, keepdim=True) > -torch.inf
    return torch.where(some, below, others).argmax(-1, keepdim=True)


def negative_count(config: AlignmentConfig, total: int, k: int | None = None) -> int:
    """How many negatives of each pair of a batch of `total` count; `k` is this step's where it is not the config's."""
    if config.negatives in ("hardest", "semi_hard"):
        return 1
    return total - 1 if config.negatives == "all" else min(config.k if k is None else k, total - 1)


def annealed_count(total: int, elapsed: float) -> int:
    """k when a share of the run is done: (C−1)^(1−elapsed), from all negatives of a batch of C pairs to one."""
    return max(1, round((total - 1) ** (1 - elapsed)))


def counts_nearly_all(config: AlignmentConfig, k: int, total: int) -> bool:
    """Whether an annealed k is so high that (2k+1)·C chosen pairs cost more, in memory first, than all C²."""
    return config.anneal and k > total // 32


def contrast(positive: Tensor, row: Tensor, column: Tensor, config: AlignmentConfig, scale: Tensor | float) -> Tensor:
    """The loss of the positives [C] against the negatives of their rows and of their columns, both [C, k].

    The triplet loss adds the two directions (Eq. 8); the softmax averages them, as CLIP's does.
    """
    if config.loss == "triplet":
        return triplet(positive, row, config.gamma) + triplet(positive, column, config.gamma)
    return (softmax(positive, row, scale) + softmax(positive, column, scale)) / 2
