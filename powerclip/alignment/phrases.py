"""Phrases of a batch of captions: packed trees (`Phrases`) and their embeddings (Eqs. 3 and 4).

Axes: C captions · L tokens · D width · P leaves of all captions · T nodes of all captions (T = Σ K)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.ragged import Segments


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
    # Kept as numbers so that the GPU is never asked for them:
    max_leaves: int  # most leaves of any caption here
    max_nodes: int  # most nodes of any caption here

    def __len__(self) -> int:
        return len(self.words)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Phrases:
        """The same trees on another device."""
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in moved.items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device, non_blocking=non_blocking)
        return Phrases(**moved)

    @property
    def leaf_segments(self) -> Segments:
        """Which caption each leaf belongs to."""
        return Segments.from_lengths(self.leaf_offsets.diff(), len(self.leaf_start), self.max_leaves)

    @property
    def node_segments(self) -> Segments:
        """Which caption each node belongs to."""
        return Segments.from_lengths(self.node_offsets.diff(), len(self.node_start), self.max_nodes)

    @property
    def node_sizes(self) -> Tensor:
        """How many leaves each node has [T]."""
        return self.node_end - self.node_start


def single_tokens(phrases: Phrases) -> Phrases:
    """Table 6, "w/o parse trees": every word token is a leaf and a node of its own."""
    caption, place = phrases.words.nonzero(as_tuple=True)
    counts = phrases.words.sum(-1)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    leaf = torch.arange(len(place), device=place.device) - offsets[caption]
    longest = int(counts.max())
    return Phrases(
        words=phrases.words,
        leaf_start=place,
        leaf_end=place + 1,
        leaf_offsets=offsets,
        node_start=leaf,
        node_end=leaf + 1,
        node_offsets=offsets,
        max_leaves=longest,
        max_nodes=longest,
    )


def embed_leaves(words: Tensor, phrases: Phrases) -> Tensor:
    """Eq. 4: ψ(T | P_m') [P, D], the normalised sum of each leaf's word features [C, L, D]."""
    # Select, never multiply by zero: a compiled text tower may leave NaN at padded positions, and 0 · NaN is NaN.
    kept = torch.where(phrases.words.unsqueeze(-1), words.float(), 0.0)
    return F.normalize(_range_sums(kept, phrases.leaf_segments.index, phrases.leaf_start, phrases.leaf_end), dim=-1)


def embed_nodes(leaves: Tensor, phrases: Phrases) -> Tensor:
    """Eq. 3: p_B [T, D], the sum of each node's leaves [P, D]."""
    segments = phrases.leaf_segments
    place = torch.arange(len(leaves), device=leaves.device) - phrases.leaf_offsets[segments.index]
    rows = leaves.new_zeros(len(phrases), phrases.max_leaves, leaves.shape[-1])
    rows = rows.index_put((segments.index, place), leaves)
    return _range_sums(rows, phrases.node_segments.index, phrases.node_start, phrases.node_end)


def _range_sums(rows: Tensor, row: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Sums of `rows[row, start:end]` by prefix sums. They run within a caption: over the batch, float32 would drown."""
    prefix = F.pad(rows.cumsum(1), (0, 0, 1, 0))  # [C, L+1, D]
    return prefix[row, end] - prefix[row, start]
