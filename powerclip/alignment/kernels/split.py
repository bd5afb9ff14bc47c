"""Float32 matrix products on half-precision tensor cores: each factor as the sum of two float16 numbers.

With a = a₁ + a₂ (the rounded number and what rounding lost), a·b ≈ a₁b₁ + a₁b₂ + a₂b₁. Two float16 numbers hold 22
bits, two bf16 ones only 16; float16's range, up to 65,504, is ample for regions of length 1 and for sums of a caption's
leaves.

Axes: D width · T nodes · B images · M regions · … anything
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_pair(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Factors […, D] in bf16 as they are, in any other dtype as float16 […, 3D] with the same inner products.

    One product of three times the width: a kernel for half precision needs no second code path.
    """
    if left.dtype == right.dtype == torch.bfloat16:
        return left, right
    (left_high, left_low), (right_high, right_low) = halves(left), halves(right)
    return torch.cat([left_high, left_high, left_low], -1), torch.cat([right_high, right_low, right_high], -1)


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The number rounded to float16, and what that lost, in float16 too."""
    high = values.half()
    return high, (values - high.to(values.dtype)).half()


def product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two half-precision matrices, summed and given in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def product_of_halves(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Tensor:
    """The product of two matrices that are given by their halves, in float32."""
    total = product(left[0], right[0])
    total += product(left[0], right[1])
    total += product(left[1], right[0])
    return total


def by_region(regions: Tensor) -> Tensor:
    """Regions [B, M, D] as rows [M·B, D], images of the same region side by side."""
    return regions.transpose(0, 1).reshape(-1, regions.shape[-1])


def similarities(regions: Tensor, nodes: Tensor) -> Tensor:
    """⟨φ_m, p_B⟩ as [T, M, B] in float32: images side by side, as kernels read them."""
    images, count, _ = regions.shape
    rows = by_region(regions)
    if regions.is_cuda:
        left, right = split_pair(nodes, rows)
        q = product(left, right.T)
    else:
        q = nodes.float() @ rows.float().T
    return q.view(len(nodes), count, images)
