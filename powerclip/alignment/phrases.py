"""Phrases of a batch of captions: packed trees (`Phrases`) and their embeddings (Eqs. 3 and 4).

Axes: C captions · L tokens · D width · P leaves of all captions · T nodes of all captions (T = Σ K)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.pooling import masked_sums, normalise, subtract
from powerclip.alignment.ragged import Segments, pad, unpad
from powerclip.runtime.distributed import SINGLE, Ranks


@dataclass(frozen=True)
class Phrases:
    """A ragged batch of parse trees, packed end to end.

    A leaf is a range of tokens of its caption, a node is a range of leaves. Tokens inside a leaf's range that are
    not words (punctuation) are left out by `words`.
    """

    words: Tensor  # [C, L] bool: the tokens that belong to some leaf
    leaf_start: Tensor  # [P] first token of the leaf, a position in its caption's row
    leaf_end: Tensor  # [P] one past its last token
    leaf_offsets: Tensor  # [C+1] caption c owns leaves leaf_offsets[c] … leaf_offsets[c+1]-1
    node_start: Tensor  # [T] first leaf of the node, counted within its caption
    node_end: Tensor  # [T] one past its last leaf, counted within its caption
    node_offsets: Tensor  # [C+1] caption c owns nodes node_offsets[c] … node_offsets[c+1]-1
    # Kept as Python numbers to avoid a device sync:
    max_leaves: int  # most leaves of any caption here
    max_nodes: int  # most nodes of any caption here

    def __len__(self) -> int:
        return len(self.words)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Phrases:
        """The same trees on another device."""
        return self.map(lambda values: values.to(device, non_blocking=non_blocking))

    def map(self, move: Callable[[Tensor], Tensor]) -> Phrases:
        """The same trees with every tensor moved."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {name: move(part) for name, part in parts.items() if isinstance(part, Tensor)}
        return replace(self, **tensors)

    @property
    def leaf_segments(self) -> Segments:
        """Which caption each leaf belongs to."""
        return Segments.from_lengths(self.leaf_offsets.diff(), len(self.leaf_start), self.max_leaves)

    @property
    def node_segments(self) -> Segments:
        """Which caption each node belongs to."""
        return Segments.from_lengths(self.node_offsets.diff(), len(self.node_start), self.max_nodes)


def single_tokens(phrases: Phrases) -> Phrases:
    """Table 6, "w/o parse trees": every word token is a leaf and a node of its own."""
    # Two device syncs: the number of words, and the most of one caption.
    caption, position = phrases.words.nonzero(as_tuple=True)
    counts = phrases.words.sum(-1)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    leaf = torch.arange(len(position), device=position.device) - offsets[caption]
    longest = int(counts.max())
    return Phrases(
        words=phrases.words,
        leaf_start=position,
        leaf_end=position + 1,
        leaf_offsets=offsets,
        node_start=leaf,
        node_end=leaf + 1,
        node_offsets=offsets,
        max_leaves=longest,
        max_nodes=longest,
    )


def embed_leaves(words: Tensor, phrases: Phrases) -> Tensor:
    """Eq. 4: ψ(T | P_m') [P, D], the normalised sum of each leaf's word features [C, L, D]."""
    return unpad(leaf_rows(words, phrases), phrases.leaf_segments)


def embed_nodes(leaves: Tensor, phrases: Phrases) -> Tensor:
    """Eq. 3: p_B [T, D], the sum of each node's leaves [P, D]."""
    return nodes_of_rows(pad(leaves, phrases.leaf_segments, 0.0), phrases, phrases.node_segments)


def leaf_rows(
    words: Tensor, phrases: Phrases, *, centred: bool = False, ranks: Ranks = SINGLE, mean: Tensor | None = None
) -> Tensor:
    """Each caption's leaves as a row [C, max_leaves, D], zeros behind the last one.

    Where they are `centred`, the mean word of the batch on all `ranks`, or another `mean` [D], is subtracted from every
    word.
    """
    real = phrases.words.unsqueeze(1)
    start, end, offsets = phrases.leaf_start, phrases.leaf_end, phrases.leaf_offsets
    masks = _ranges(start, end, offsets, phrases.max_leaves, words.shape[1]) & real
    # A compiled text tower may leave NaN at padded positions.
    if not centred:
        return normalise(masked_sums(words, masks, phrases.words))
    # One more row covers the caption: the sum over all words costs no pass of its own.
    sums, total = masked_sums(words, torch.cat([masks, real], 1), phrases.words).split([masks.shape[1], 1], 1)
    if mean is None:
        mean = ranks.sum(total.sum((0, 1))) / ranks.sum(phrases.words.sum())
    return normalise(subtract(sums, masks, mean))


def nodes_of_rows(leaves: Tensor, phrases: Phrases, segments: Segments, *, mean: bool = False) -> Tensor:
    """p_B [T, D] of leaves in rows, as `leaf_rows` gives them, or p_B divided by its number of leaves.

    `segments` are `phrases.node_segments`, which a caller who needs them too makes once.
    """
    start, end, offsets = phrases.node_start, phrases.node_end, phrases.node_offsets
    weights = _ranges(start, end, offsets, phrases.max_nodes, phrases.max_leaves).to(leaves.dtype)
    if mean:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)  # at least 1: padding has no leaves
    return unpad(weights @ leaves, segments)


def node_ranges(phrases: Phrases) -> tuple[Tensor, Tensor]:
    """The tokens of each node: first and one past the last [C, max_nodes], 0 and 0 behind a caption's last node."""
    segments = phrases.node_segments
    first = phrases.leaf_offsets[segments.index]
    start = phrases.leaf_start[first + phrases.node_start]
    end = phrases.leaf_end[first + phrases.node_end - 1]
    members, real = segments.rows()
    return start[members].where(real, 0), end[members].where(real, 0)


def _ranges(start: Tensor, end: Tensor, offsets: Tensor, count: int, length: int) -> Tensor:
    """Masks [C, count, length] of the ranges that each caption owns; behind its last one they are empty."""
    member = offsets[:-1, None] + torch.arange(count, device=start.device)
    real = member < offsets[1:, None]
    member = member.clamp(max=len(start) - 1)
    position = torch.arange(length, device=start.device)
    return real.unsqueeze(-1) & (start[member].unsqueeze(-1) <= position) & (position < end[member].unsqueeze(-1))
