"""Exact inference over all trees of a sentence, a whole batch at a time: one step for each length of span.

A chart has a cell for each span, ordered by length and then by start: first the n spans of one word, then the n-1 of
two, …, at last the whole sentence. A cell's score is that of its best label (or the log-sum-exp over labels), with 0
for "no phrase". A phrase of many children is cut to the left, ((a b) c) d, with no phrase on the inner cuts: every tree
then has exactly one derivation, so that the sum over derivations is the sum over trees. With `any` = phrase or inner
cut, and `full` = phrase (or single word):

    split(i, j) = max or log-sum-exp over k of any(i, k) + full(k, j)
    full(i, j)  = label(i, j) + split(i, j)
    any(i, j)   = max or log-sum-exp of full(i, j) and split(i, j)

Axes: B sentences, n words, cells n (n + 1) / 2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@lru_cache(maxsize=128)
def cell_edges(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First words, and ends, of the cells of a sentence of `length` words."""
    with torch.inference_mode(False):  # the cached tensors may be used by training later
        firsts = torch.cat([torch.arange(length - width + 1) for width in range(1, length + 1)])
        widths = torch.repeat_interleave(torch.arange(1, length + 1), torch.arange(length, 0, -1))
        return firsts.to(device), (firsts + widths).to(device)


def cell(first: int, end: int, length: int) -> int:
    """The cell of words `first` … `end`-1 in the chart of a sentence of `length` words."""
    width = end - first
    return (width - 1) * length - (width - 1) * (width - 2) // 2 + first


def log_partition(labels: Tensor, lengths: Tensor) -> Tensor:
    """The log of the sum over all trees of each sentence, differentiable: its gradient are the marginals.

    Args:
        labels: B × cells, log-sum-exp of a span's label scores; sentences are padded to the longest.
        lengths: B, on the same device.
    """
    return _LogPartition.apply(labels, lengths)


def marginals(labels: Tensor, lengths: Tensor) -> Tensor:
    """The probability that each span is a phrase, B × cells, under the model that `log_partition` normalises."""
    return _inside_outside(labels, lengths)[1]


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, labels: Tensor, lengths: Tensor) -> Tensor:
        partition, shares = _inside_outside(labels.detach(), lengths)
        ctx.save_for_backward(shares)
        return partition

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (shares,) = ctx.saved_tensors
        return gradient[:, None] * shares, None


def _inside_outside(labels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The log-partition of each sentence and the marginals of all spans.

    Rows of `left` are starts i and hold any(i, i+1), any(i, i+2), …; rows of `right` are ends j and hold the other
    halves in the same order, …, full(j-2, j), full(j-1, j): width w lies at left[i, w-1] and at right[j-1, n-w]. So all
    cuts of all spans of one width are two rectangles laid on each other.
    """
    batch, length = len(labels), _length(labels.shape[1])
    sizes = tuple(range(length, 0, -1))
    label, either = labels.split(sizes, dim=1), F.softplus(labels).split(sizes, dim=1)
    left = labels.new_empty(batch, length, length)
    right = labels.new_empty(batch, length, length)
    left[:, :, 0] = right[:, :, -1] = either[0]
    splits = []
    for width in range(2, length + 1):
        rows = length - width + 1
        split = torch.logsumexp(left[:, :rows, : width - 1] + right[:, width - 1 :, rows:], dim=-1)
        left[:, :rows, width - 1] = split + either[width - 1]
        right[:, width - 1 :, rows - 1] = split + label[width - 1]
        splits.append(split)

    sentences = torch.arange(batch, device=labels.device)
    roots = sentences, lengths - 1, length - lengths
    words = lengths == 1
    partition = torch.where(words, labels[:, 0], right[roots])

    # Outside: how much of the sum goes through each `any` and `full`, from the whole sentences down.
    to_left, to_right = torch.zeros_like(left), torch.zeros_like(right)
    to_right[roots] = 1
    phrase = torch.sigmoid(labels)
    shares = torch.empty_like(labels)
    for width in range(length, 1, -1):
        rows = length - width + 1
        begin = cell(0, width, length)
        full, any_ = to_right[:, width - 1 :, rows - 1], to_left[:, :rows, width - 1]
        shares[:, begin : begin + rows] = full + any_ * phrase[:, begin : begin + rows]
        halves = left[:, :rows, : width - 1] + right[:, width - 1 :, rows:] - splits[width - 2][:, :, None]
        through = halves.exp_() * (full + any_)[:, :, None]
        to_left[:, :rows, : width - 1] += through
        to_right[:, width - 1 :, rows:] += through
    shares[:, :length] = (to_left[:, :, 0] + to_right[:, :, -1]) * phrase[:, :length]
    shares[:, 0] = torch.where(words, 1.0, shares[:, 0])
    return partition, shares


def best_trees(labels: Tensor, lengths: Tensor) -> Tensor:
    """Which cells are phrases in the best tree of each sentence: B × cells, boolean.

    Args:
        labels: B × cells, each span's best label score; sentences are padded to the longest.
        lengths: B, on the same device.
    """
    longest = _length(labels.shape[1])
    diagonals = labels.split(tuple(range(longest, 0, -1)), dim=1)
    # The same tables as in `_inside_outside`.
    left = labels.new_empty(labels.shape[0], longest, longest)
    right = labels.new_empty(labels.shape[0], longest, longest)
    left[:, :, 0] = right[:, :, -1] = diagonals[0].clamp(min=0)
    cuts: list[Tensor] = []
    for width in range(2, longest + 1):
        rows = longest - width + 1
        split, cut = (left[:, :rows, : width - 1] + right[:, width - 1 :, rows:]).max(dim=-1)
        label = diagonals[width - 1]
        left[:, :rows, width - 1] = split + label.clamp(min=0)
        right[:, width - 1 :, rows - 1] = split + label
        cuts.append(cut)
    return _trace(labels, lengths, cuts)


def _trace(labels: Tensor, lengths: Tensor, cuts: list[Tensor]) -> Tensor:
    """From the roots down: the phrases of the best derivations, given where spans of two and more words are cut."""
    longest = len(cuts) + 1
    begins = torch.tensor([cell(0, width, longest) for width in range(1, longest + 1)], device=labels.device)
    roots = begins[lengths - 1, None]
    used = torch.zeros(labels.shape, dtype=torch.int32, device=labels.device).scatter_(1, roots, 1)
    full = used.clone()  # used as a right child or root: must be a phrase
    starts = torch.arange(longest, device=labels.device)
    for width in range(longest, 1, -1):
        rows = longest - width + 1
        begin = cell(0, width, longest)
        parents, cut = used[:, begin : begin + rows].clone(), cuts[width - 2]  # the left part's width, less one
        child = begins[width - 2 - cut] + starts[:rows] + cut + 1
        # No cell is used twice, so that adding marks is setting them; what is not used adds nothing.
        used.scatter_add_(1, begins[cut] + starts[:rows], parents)
        used.scatter_add_(1, child, parents)
        full.scatter_add_(1, child, parents)
    full[:, :longest] = 0  # a single word need not be a phrase
    full.scatter_(1, roots, 1)  # unless it is all there is
    return ((labels > 0) | (full > 0)) & (used > 0)


def _length(cells: int) -> int:
    """The number of words whose chart has so many cells."""
    length = int((2 * cells) ** 0.5)
    return length if length * (length + 1) == 2 * cells else length - 1
