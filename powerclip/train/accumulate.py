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
        further = None if batch.further is None else _part_of(batch.further.tokens, rows, len(batch))
        features: Features = towers(batch.images[rows], trimmed, plan.rows(rows), further)
        return replace(features, words=F.pad(features.words, (0, 0, 0, tokens.shape[1] - trimmed.shape[1])))

    with torch.no_grad():
        detached = [_without_unused(run(state.unwrapped_towers, rows), state.objective.dense) for rows in parts]
    features = join_parts(detached)
    del detached
    # The objective's own parameters get their gradient here, the towers' not yet.
    terms = state.objective.loss(features, batch, state.ranks)
    mark_loss(terms.total).backward()
    gradients = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in tree_leaves(features)]
    del features
    for rows in parts[:-1]:
        with no_sync(state.towers):
            backward_part(run(state.towers, rows), gradients, rows, len(batch))
    backward_part(run(state.towers, parts[-1]), gradients, parts[-1], len(batch), last=True)
    return terms


def join_parts(parts: Sequence[Features]) -> Features:
    """The features of all parts as the leaves of a graph; each part has the same number of rows of each of them."""

    def join(first: Any, *others: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        joined = torch.cat([first, *others]) if first.ndim > 0 else first
        return joined.detach().requires_grad_() if joined.is_floating_point() else joined

    return tree_map(join, *parts)


def backward_part(
    features: Features, gradients: Sequence[Tensor | None], rows: slice, count: int, *, last: bool = False
) -> None:
    """Backward pass of the part with these rows of `count` pairs, given the gradients of all features.

    Values that all parts share, the scales, go with the last part.
    """
    outputs, output_gradients = [], []
    for value, gradient in zip(tree_leaves(features), gradients, strict=True):
        if gradient is None or not value.requires_grad:
            continue
        shared = value.ndim == 0
        if shared and not last:
            continue
        outputs.append(value)
        output_gradients.append((gradient if shared else _part_of(gradient, rows, count)).to(value.dtype))
    # Not the sum of products: padded words may be NaN, and their gradient is 0.
    torch.autograd.backward(outputs, output_gradients)


def _part_of(values: Tensor, rows: slice, count: int) -> Tensor:
    """What belongs to some rows of `count` pairs: of mosaics and of further texts there are not as many as of pairs."""
    return values[rows.start * len(values) // count : rows.stop * len(values) // count]


def _without_unused(features: Features, dense: bool) -> Features:
    """Without patches and words where the loss does not use them: they are by far the largest."""
    if dense:
        return features
    return replace(features, patches=features.patches[:, :0].clone(), words=features.words[:, :0].clone())
