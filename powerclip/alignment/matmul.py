"""Float32 matrix products on half-precision tensor cores: each factor as the sum of two float16 numbers.

With a = a₁ + a₂ (the rounded number and what rounding lost), a·b ≈ a₁b₁ + a₁b₂ + a₂b₁. Two float16 numbers hold 22
bits, two bf16 ones only 16; float16's range, up to 65,504, is ample for regions of length 1 and for sums of a caption's
leaves.

Axes: D width · T nodes · B images · M regions · … anything
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from powerclip.alignment.backends import is_interpreted


def split_pair(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Factors […, D] as float16 […, 3D] with the same inner products: one product of three times the width."""
    return _side_by_side(left, 2), _side_by_side(right, 1)


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """The number rounded to float16, and what that lost, in float16 too."""
    if _has_kernel(values):
        from powerclip.alignment.kernels.split_halves import write_halves

        high, low = values.new_empty(2, *values.shape, dtype=torch.float16)
        write_halves(values, high, low)
        return high, low
    high = values.half()
    return high, (values - high.to(values.dtype)).half()


def _side_by_side(values: Tensor, low_position: int) -> Tensor:
    """Twice the high half and once the low one, the latter at `low_position` of the three: […, D] as […, 3D]."""
    if _has_kernel(values):
        from powerclip.alignment.kernels.split_halves import write_halves

        wide = values.new_empty(*values.shape[:-1], 3 * values.shape[-1], dtype=torch.float16)
        parts = list(wide.chunk(3, -1))
        low = parts.pop(low_position)
        write_halves(values, parts[0], low, parts[1])
        return wide
    high, low = halves(values)
    parts = [high, high]
    parts.insert(low_position, low)
    return torch.cat(parts, -1)


def _has_kernel(values: Tensor) -> bool:
    """Whether one kernel splits these values. Plain torch gives the same bits in five passes."""
    return values.dtype == torch.float32 and (values.is_cuda or is_interpreted()) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two half-precision matrices, summed and given in float32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


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


def input_gradients(
    of_q: Tensor, node_halves: tuple[Tensor, Tensor], region_halves: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradients in float32 of regions [M·B, D] and nodes [T, D], both as their halves, for that of q.

    It is float16 [T, 2·M·B]: a row is the gradient of a node's similarities rounded, and then what rounding lost.
    """
    half = of_q.shape[1] // 2
    (node_high, node_low), (high, low) = node_halves, region_halves
    of_nodes = product(of_q, torch.cat([high, high]))
    of_nodes += product(of_q[:, :half], low)
    of_regions = product(of_q.T, node_high).unflatten(0, (2, half)).sum(0)
    of_regions += product(of_q[:, :half].T, node_low)
    return of_regions, of_nodes
