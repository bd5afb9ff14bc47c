"""Sums of dense features under masks, for regions and for leaves; centring and normalising of the sums.

Axes: C pairs of the batch · M masks of each · N patches or tokens · D width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def masked_sums(values: Tensor, masks: Tensor, valid: Tensor | None = None) -> Tensor:
    """Sums [C, M, D] of values [C, N, D] under masks [C, M, N], in float32 whatever the towers compute in.

    Values that are not `valid` [C, N] may be anything, NaN too; no mask may cover them.
    """
    return _MaskedSums.apply(values, masks, valid)


def subtract(sums: Tensor, masks: Tensor, centre: Tensor) -> Tensor:
    """The sums [C, M, D] of what lies under masks [C, M, N], with a `centre` [… 1, D] taken from each summand."""
    # Sums are linear: it is subtracted from M sums, not from N summands.
    return torch.addcmul(sums, masks.sum(-1, keepdim=True, dtype=sums.dtype), centre, value=-1)


def normalise(vectors: Tensor) -> Tensor:
    """Vectors […, D] of length 1."""
    return _Normalise.apply(vectors)


class _MaskedSums(torch.autograd.Function):
    """One matrix product each way. With bf16 values on a GPU there is no float32 copy of them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, masks: Tensor, valid: Tensor | None) -> Tensor:
        ctx.dtype = values.dtype
        ctx.half = values.is_cuda and values.dtype == torch.bfloat16
        masks = _aligned(masks, values.dtype if ctx.half else torch.float32)
        ctx.save_for_backward(masks)
        if valid is not None:
            # Selected, never multiplied by zero: 0 · NaN is NaN.
            values = torch.where(valid.unsqueeze(-1), values, 0)
        if ctx.half:
            return torch.bmm(masks, values, out_dtype=torch.float32)
        return masks @ values.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (masks,) = ctx.saved_tensors
        return (masks.mT @ gradients[0].to(masks.dtype)).to(ctx.dtype), None, None


def _aligned(masks: Tensor, dtype: torch.dtype) -> Tensor:
    """Masks [C, M, N] as numbers whose rows begin at multiples of 16 bytes: cuBLAS takes twice as long over others."""
    count = masks.shape[-1]
    rows = torch.zeros(*masks.shape[:-1], -(-count // 8) * 8, dtype=dtype, device=masks.device)[..., :count]
    return rows.copy_(masks)


class _Normalise(torch.autograd.Function):
    """What F.normalize computes; its backward reads and writes all vectors ten times, this one four times."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp(min=1e-12)
        unit = vectors / length
        ctx.save_for_backward(unit, length)
        return unit

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        unit, length = ctx.saved_tensors
        along = (gradients[0] * unit).sum(-1, keepdim=True)
        return torch.addcmul(gradients[0], unit, along, value=-1) / length
