"""The gradient of one step: the whole batch at once, or in parts that still see each other as negatives.

In parts (`train.accumulate: n`): first all parts go through the towers without a graph, and their features are kept.
The loss of the whole batch gives the gradient of each feature. Then each part goes through the towers again, now with a
graph, and the gradients of its features are sent back through it. The towers treat each pair by itself and draw nothing
at random (`Plan` has what was drawn), so both passes give the same features, and loss and gradients are those of the
whole batch. It costs a second forward pass and saves the memory of all but one part.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021.

Axes: C pairs of this rank's batch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.data.batch import Batch, shorter_captions
from powerclip.data.loader import mix
from powerclip.encoders import Features
from powerclip.objectives import Terms
from powerclip.objectives.plan import Draws, Plan
from powerclip.train.guard import mark_loss
from powerclip.train.recipe import Recipe
from powerclip.train.state import TrainState


def backward(state: TrainState, batch: Batch, recipe: Recipe) -> Terms:
    """The loss of a batch; afterwards its gradient, averaged over ranks, is that of every trained parameter."""
    plan = plan_step(state, batch.images, recipe.train.seed)
    state.optimizer.zero_grad(set_to_none=True)
    if recipe.train.accumulate == 1:
        # The loss is outside of autocast: similarities that carry a gradient are float32.
        terms = state.objective.loss(encode(state.towers, batch.images, batch.token_groups, plan), batch, state.ranks)
        mark_loss(terms.total).backward()
    else:
        terms = backward_in_parts(state, batch, plan, recipe.train.accumulate)
    state.ranks.average_gradients(state.unwrapped_parameters)
    return terms


def plan_step(state: TrainState, images: Tensor, seed: int) -> Plan:
    """What is drawn and decided for this step's images: a function of the seed, the step and the whole batch."""
    generator = torch.Generator(state.device)
    generator.manual_seed(mix(mix(seed, -1), state.step))  # not the loader's: it seeds with the step as well
    noise = state.objective.draw(state.encoder, len(images), Draws(state.device, generator, state.ranks))
    return state.unwrapped_towers.plan(images, noise, state.ranks)


def encode(towers: Any, images: Tensor, tokens: Tensor | tuple[Tensor, ...], plan: Plan) -> Features:
    """The features of some pairs, by `Towers` or what is wrapped around them."""
    kind, fields = towers(images, tokens, plan)
    return kind(**fields)  # type: ignore[no-any-return]


def backward_in_parts(state: TrainState, batch: Batch, plan: Plan, count: int) -> Terms:
    """`backward` with the towers' part done in `count` equal parts."""
    size = len(batch) // count
    parts = [slice(start, start + size) for start in range(0, len(batch), size)]

    def run(towers: Any, rows: slice) -> Features:
        tokens = batch.tokens[rows]
        # Sorted by length, most parts have short captions only.
        shorter = 0 < batch.short < tokens.shape[1] and rows.stop <= shorter_captions(len(batch))
        given = tokens[:, : batch.short] if shorter else tokens
        features = encode(towers, batch.images[rows], given, plan.rows(rows))
        return replace(features, words=F.pad(features.words, (0, 0, 0, tokens.shape[1] - given.shape[1])))

    with torch.no_grad():
        kept = [_needed(run(state.unwrapped_towers, rows), state.objective.dense) for rows in parts]
    features = join(kept, size)
    del kept
    # The objective's own parameters get their gradient here, the towers' not yet.
    terms = state.objective.loss(features, batch, state.ranks)
    mark_loss(terms.total).backward()
    gradients = {name: value.grad for name, value in _tensors(features) if value.grad is not None}
    del features
    for rows in parts[:-1]:
        with unsynchronised(state):
            send_back(run(state.towers, rows), gradients, rows, size)
    send_back(run(state.towers, parts[-1]), gradients, parts[-1], size, last=True)
    return terms


def join(parts: Sequence[Features], size: int) -> Features:
    """The features of all parts, `size` pairs in each, as the leaves of a graph."""
    fields: dict[str, Any] = dict(vars(parts[0]))
    for name, value in _tensors(parts[0]):
        if _has_rows(value, size):
            fields[name] = torch.cat([getattr(part, name) for part in parts])
        if value.is_floating_point():
            fields[name] = fields[name].detach().requires_grad_()
    return type(parts[0])(**fields)


def send_back(features: Features, gradients: dict[str, Tensor], rows: slice, size: int, *, last: bool = False) -> None:
    """Send the gradients of all pairs' features back through those of some; what all share goes with the last."""
    outputs, arriving = [], []
    for name, value in _tensors(features):
        if name not in gradients or not value.requires_grad:
            continue
        shared = not _has_rows(value, size)
        if shared and not last:
            continue
        outputs.append(value)
        arriving.append((gradients[name] if shared else gradients[name][rows]).to(value.dtype))
    # Not the sum of products: padded words may be NaN, and their gradient is 0.
    torch.autograd.backward(outputs, arriving)


@contextmanager
def unsynchronised(state: TrainState) -> Iterator[None]:
    """Gradients stay on their rank until a later backward pass, which averages all of them."""
    towers: Any = state.towers
    if hasattr(towers, "no_sync"):  # DistributedDataParallel
        with towers.no_sync():
            yield
    elif hasattr(towers, "set_requires_gradient_sync"):  # FSDP
        towers.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            towers.set_requires_gradient_sync(True)
    else:
        yield


def _needed(features: Features, dense: bool) -> Features:
    """Without patches and words where the loss does not look at them: they are by far the largest."""
    if dense:
        return features
    fields = vars(features) | {name: getattr(features, name)[:, :0].clone() for name in ("patches", "words")}
    return type(features)(**fields)


def _tensors(features: Features) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in vars(features).items() if isinstance(value, Tensor))


def _has_rows(value: Tensor, size: int) -> bool:
    return value.ndim > 0 and len(value) == size
