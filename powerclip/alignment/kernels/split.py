"""Float32 matrix products on half-precision tensor cores: each factor as the sum of two float16 numbers, side by side.

With a = a₁ + a₂ (the rounded number and what rounding lost), a·b ≈ a₁b₁ + a₁b₂ + a₂b₁. That is one float16 product of
three times the width, so a kernel for half precision needs no second code path. Two float16 numbers hold 22 bits, two
bf16 ones only 16; float16's range, up to 65,504, is ample for regions of length 1 and for sums of a caption's leaves.

Axes: D width · … anything
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_pair(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Factors […, D] in bf16 as they are, in any other dtype as float16 […, 3D] with the same inner products."""
    if left.dtype == right.dtype == torch.bfloat16:
        return left, right
    (left_high, left_low), (right_high, right_low) = _halves(left), _halves(right)
    return torch.cat([left_high, left_high, left_low], -1), torch.cat([right_high, right_low, right_high], -1)


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    high = values.half()
    return high, (values - high.to(values.dtype)).half()
