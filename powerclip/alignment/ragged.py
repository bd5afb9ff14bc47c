"""Reductions over ragged groups that lie end to end along the first axis.

Axes: T members of all groups · S groups · … anything
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which group each of T members belongs to. Groups are contiguous and none is empty."""

    index: Tensor  # [T] group of each member
    lengths: Tensor  # [S] members of each group

    @classmethod
    def from_offsets(cls, offsets: Tensor) -> Segments:
        """Groups given as an offsets vector [S+1]."""
        return cls.from_lengths(offsets.diff())

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> Segments:
        """Groups given by how many members each has [S]."""
        groups = torch.arange(len(lengths), device=lengths.device)
        return cls(torch.repeat_interleave(groups, lengths), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def lengths_like(self, values: Tensor) -> Tensor:
        """The lengths [S, 1, …] in the dtype of `values` [S, …], ready to divide by."""
        return self.lengths.to(values.dtype).view(-1, *[1] * (values.ndim - 1))


def segment_sum(values: Tensor, segments: Segments) -> Tensor:
    """Sum of each group: [T, …] → [S, …]."""
    return values.new_zeros(len(segments), *values.shape[1:]).index_add(0, segments.index, values)


def segment_mean(values: Tensor, segments: Segments) -> Tensor:
    """Mean of each group: [T, …] → [S, …]."""
    total = segment_sum(values, segments)
    return total / segments.lengths_like(total)


def segment_max(values: Tensor, segments: Segments) -> Tensor:
    """Maximum of each group: [T, …] → [S, …]. Tied members share the gradient."""
    index = segments.index.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
    lowest = values.new_full((len(segments), *values.shape[1:]), -torch.inf)
    return lowest.scatter_reduce(0, index, values, "amax")


def segment_logsumexp(values: Tensor, segments: Segments) -> Tensor:
    """log Σ exp of each group, with the maximum taken out: [T, …] → [S, …]."""
    highest = segment_max(values.detach(), segments)
    return highest + segment_sum((values - highest[segments.index]).exp(), segments).log()
