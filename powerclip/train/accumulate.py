"""The gradient of a batch whose towers run in parts, which still see each other as negatives (GradCache).

First all parts go through the towers without a graph, and their features are kept. The loss of the whole batch gives
the gradient of each feature. Then each part goes through the towers again, now with a graph, and the gradients of its
features are sent back through it. The towers treat each pair by itself and draw nothing at random (`Plan` has what was
drawn), so both passes give the same features, and loss and gradients are those of the whole batch. It costs a second
forward pass and saves the memory of all but one part.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021.

Axes: C pairs of this rank's batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from powerclip.data.batch import Batch, shorter_captions
from powerclip.encoders import Features
from powerclip.objectives import Plan, Terms
from powerclip.train.guard import mark_loss
from powerclip.train.parallel import no_sync

if TYPE_CHECKING:
    from powerclip.train.state import TrainState


def backward_in_parts(state: TrainState, batch: Batch, plan: Plan, count: int) -> Terms:
    """The loss of a batch, with its gradient, its towers run in `count` equal parts (`train.accumulate`)."""
    size = len(batch) // count
    parts = [slice(start, start + size) for start in range(0, len(batch), size)]

    def run(towers: nn.Module, rows: slice) -> Features:
        tokens = batch.tokens[rows]
        # Sorted by length, most parts have short captions only.
        shorter = 0 < batch.short < tokens.shape[1] and rows.stop <= shorter_captions(len(batch))
        trimmed = tokens[:, : batch.short] if shorter else tokens
        features: Features = towers(batch.images[rows], trimmed, plan.rows(rows))
        return replace(features, words=F.pad(features.words, (0, 0, 0, tokens.shape[1] - trimmed.shape[1])))

    with torch.no_grad():
        detached = [_without_unused(run(state.unwrapped_towers, rows), state.objective.dense) for rows in parts]
    features = join_parts(detached, size)
    del detached
    # The objective's own parameters get their gradient here, the towers' not yet.
    terms = state.objective.loss(features, batch, state.ranks)
    mark_loss(terms.total).backward()
    gradients = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in tree_leaves(features)]
    del features
    for rows in parts[:-1]:
        with no_sync(state.towers):
            backward_part(run(state.towers, rows), gradients, rows, size)
    backward_part(run(state.towers, parts[-1]), gradients, parts[-1], size, last=True)
    return terms


def join_parts(parts: Sequence[Features], size: int) -> Features:
    """The features of all parts, `size` pairs in each, as the leaves of a graph."""

    def join(first: Any, *others: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        joined = torch.cat([first, *others]) if _has_rows(first, size) else first
        return joined.detach().requires_grad_() if joined.is_floating_point() else joined

    return tree_map(join, *parts)


def backward_part(
    features: Features, gradients: Sequence[Tensor | None], rows: slice, size: int, *, last: bool = False
) -> None:
    """Backward pass of one part, given the gradients of all pairs' features; shared values go with the last part."""
    outputs, output_gradients = [], []
    for value, gradient in zip(tree_leaves(features), gradients, strict=True):
        if gradient is None or not value.requires_grad:
            continue
        shared = not _has_rows(value, size)
        if shared and not last:
            continue
        outputs.append(value)
        output_gradients.append((gradient if shared else gradient[rows]).to(value.dtype))
    # Not the sum of products: padded words may be NaN, and their gradient is 0.
    torch.autograd.backward(outputs, output_gradients)


def _without_unused(features: Features, dense: bool) -> Features:
    """Without patches and words where the loss does not use them: they are by far the largest."""
    if dense:
        return features
    return replace(features, patches=features.patches[:, :0].clone(), words=features.words[:, :0].clone())


def _has_rows(value: Tensor, size: int) -> bool:
    return value.ndim > 0 and len(value) == size
