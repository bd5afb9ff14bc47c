"""Contrasting the matched pairs with the mismatched ones, by Φγ (Eq. 8) or by a softmax.

Axes: c images of this rank · C pairs of the whole batch · k negatives of each
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.runtime.distributed import Ranks


def contrast(positive: Tensor, row: Tensor, column: Tensor, config: AlignmentConfig, scale: Tensor | float) -> Tensor:
    """The loss of the positives [c] against the negatives of their rows and of their columns, both [c, k].

    The triplet loss adds the two directions (Eq. 8); the softmax averages them, as CLIP's does.
    """
    if config.loss == "triplet":
        return triplet(positive, row, config.gamma) + triplet(positive, column, config.gamma)
    return (softmax(positive, row, scale) + softmax(positive, column, scale)) / 2


def contrast_all(
    scores: Tensor, labels: Tensor, config: AlignmentConfig, scale: Tensor | float, ranks: Ranks
) -> Tensor:
    """The same with all C − 1 negatives of each, from the scores [c, C] of this rank's images with all captions.

    `labels` [c] are the columns of the matched pairs. A caption's column crosses all ranks.
    """
    count, total = scores.shape
    positive = take_labels(scores, labels)
    if config.loss == "triplet":
        hinges = F.relu(scores - positive.unsqueeze(-1) + config.gamma)
        hinges = hinges + F.relu(scores - ranks.gather(positive) + config.gamma)
        return hinges.masked_fill(is_label(scores, labels), 0.0).sum() / (count * (total - 1))
    logits = scale * scores
    column = ranks.logsumexp(logits.logsumexp(0))[ranks.rows(count)]
    return (F.cross_entropy(logits, labels) + (column - scale * positive).mean()) / 2


def triplet(positive: Tensor, negatives: Tensor, gamma: float) -> Tensor:
    """Φγ for one direction: the mean hinge of the negatives [c, k] against the positives [c]; the paper's has k = 1."""
    return F.relu(negatives - positive.unsqueeze(-1) + gamma).mean()


def softmax(positive: Tensor, negatives: Tensor, scale: Tensor | float) -> Tensor:
    """Cross-entropy of the positive [c] among itself and its negatives [c, k], at a scale (1/temperature)."""
    logits = scale * torch.cat([positive.unsqueeze(-1), negatives], -1)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


def take_labels(scores: Tensor, labels: Tensor) -> Tensor:
    """The scores [c] of the matched pairs, whose columns in the scores [c, C] are `labels` [c]."""
    return scores.gather(1, labels.unsqueeze(-1)).squeeze(-1)


def is_label(scores: Tensor, labels: Tensor) -> Tensor:
    """Where the matched pairs are in the scores, bool [c, C]."""
    return labels.unsqueeze(-1) == torch.arange(scores.shape[1], device=scores.device)


def off_diagonal(scores: Tensor) -> Tensor:
    """The negatives of each row of a square matrix: [C, C] → [C, C−1]."""
    size = len(scores)
    return scores.flatten()[1:].view(size - 1, size + 1)[:, :-1].reshape(size, size - 1)
