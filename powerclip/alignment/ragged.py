"""Reductions over ragged groups that lie end to end along the first axis.

Groups are laid out as rows of a rectangle, padded to the longest one of the batch, and reduced there: no atomic
operations, so two runs give the same bits.

Axes: T members of all groups · S groups · K members of the longest group · … anything
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which group each of T members belongs to. Groups are contiguous and none is empty."""

    index: Tensor  # [T] group of each member
    lengths: Tensor  # [S] members of each group
    longest: int  # K

    @classmethod
    def from_lengths(cls, lengths: Tensor, total: int | None = None, longest: int | None = None) -> Segments:
        """Groups given by how many members each has [S]. With T and K given, there is no device sync."""
        groups = torch.arange(len(lengths), device=lengths.device)
        index = torch.repeat_interleave(groups, lengths, output_size=total)
        return cls(index, lengths, int(lengths.max()) if longest is None else longest)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> Tensor:
        """Where each group begins, and the end of the last one [S+1]."""
        return F.pad(self.lengths.cumsum(0), (1, 0))

    def rows(self) -> tuple[Tensor, Tensor]:
        """The members of each group as rows [S, K], and which entries are real; the others say member 0."""
        position = torch.arange(self.longest, device=self.index.device)
        first = self.lengths.cumsum(0) - self.lengths
        real = position < self.lengths.unsqueeze(-1)
        return torch.where(real, first.unsqueeze(-1) + position, 0), real

    def positions(self) -> Tensor:
        """The position of each member in its group [T]."""
        first = self.lengths.cumsum(0) - self.lengths
        return torch.arange(len(self.index), device=self.index.device) - first[self.index]

    def lengths_like(self: Segments | Rows, values: Tensor) -> Tensor:
        """The lengths [S, 1, …] in the dtype of `values` [S, …], ready to divide by."""
        return self.lengths.to(values.dtype).view(-1, *[1] * (values.ndim - 1))


class _Pad(torch.autograd.Function):
    """Rows of a rectangle from members; its gradient is the inverse, not a sum over rows that may collide."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, members: Tensor, real: Tensor, fill: float) -> Tensor:
        ctx.save_for_backward(index, members)
        return torch.where(real.view(*real.shape, *[1] * (values.ndim - 1)), values[members], fill)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        index, members = ctx.saved_tensors
        position = torch.arange(len(index), device=index.device) - members[index, 0]
        return gradients[0][index, position], None, None, None, None


class _Unpad(torch.autograd.Function):
    """Members out of a rectangle's rows; each entry is read once, so that its gradient is written once, not added."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(index, position)
        ctx.shape = rows.shape
        return rows[index, position]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        index, position = ctx.saved_tensors
        rows = gradients[0].new_zeros(ctx.shape)
        rows[index, position] = gradients[0]
        return rows, None, None


@dataclass(frozen=True)
class Rows:
    """Groups whose members lie in the rows of a rectangle already, T = S·K; those behind a group's end do not count."""

    lengths: Tensor  # [S] members of each group
    longest: int  # K

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def real(self) -> Tensor:
        """Which entries of the rectangle hold a member [S, K]."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths.unsqueeze(-1)

    lengths_like = Segments.lengths_like


def pad(values: Tensor, segments: Segments | Rows, fill: float) -> Tensor:
    """Members [T, …] as rows [S, K, …], with `fill` where a group has ended."""
    if isinstance(segments, Rows):
        rows = values.unflatten(0, (len(segments), segments.longest))
        return torch.where(segments.real.view(*rows.shape[:2], *[1] * (values.ndim - 1)), rows, fill)
    members, real = segments.rows()
    return _Pad.apply(values, segments.index, members, real, fill)


def unpad(rows: Tensor, segments: Segments) -> Tensor:
    """The members [T, …] of rows [S, K, …]: the inverse of `pad`."""
    return _Unpad.apply(rows, segments.index, segments.positions())


def segment_sum(values: Tensor, segments: Segments | Rows) -> Tensor:
    """Sum of each group: [T, …] → [S, …]."""
    return pad(values, segments, 0.0).sum(1)


def segment_mean(values: Tensor, segments: Segments | Rows) -> Tensor:
    """Mean of each group: [T, …] → [S, …]."""
    total = segment_sum(values, segments)
    return total / segments.lengths_like(total)


def segment_max(values: Tensor, segments: Segments | Rows) -> Tensor:
    """Maximum of each group: [T, …] → [S, …]. Tied members share the gradient."""
    return pad(values, segments, -torch.inf).amax(1)


def segment_logsumexp(values: Tensor, segments: Segments | Rows) -> Tensor:
    """log Σ exp of each group, with the maximum taken out: [T, …] → [S, …]."""
    return pad(values, segments, -torch.inf).logsumexp(1)
