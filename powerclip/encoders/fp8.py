"""Linear layers whose products are in float8 on the tensor cores: `train.precision: fp8`, the towers' blocks only.

    y = x Wᵀ and ∂x = ∂y W in float8 e4m3, summed in float32 and given in bf16; ∂W = ∂yᵀ x in bf16.

Each row of a factor has its own scale, its largest number over the largest of e4m3, 448, taken anew in every product:
nothing is remembered from step to step. A row of x is a token, a row of W an output; for ∂x each column of W has its
scale. ∂W sums over all tokens, for which every column of ∂y and x would need a scale: two more passes over both, and it
is the product whose rounding training feels most. It stays in bf16.

Weights stay as they are, under their names; the optimiser, norms, attention, embeddings and projections do not change.

Axes: … any · n tokens · I inputs · O outputs
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
# The tensor cores take inner lengths, and outputs, that 16 divides.
MULTIPLE = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` [..., O] of x [..., I] in float8; in bf16 as autocast's would be."""
    y = _Fp8Product.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(y.dtype)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_product(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_y = gradients[0]
        of_x = scaled_product(of_y, weight.t())
        of_weight = of_y.to(torch.bfloat16).t() @ x.to(torch.bfloat16)
        return of_x.to(x.dtype), of_weight.to(weight.dtype)


def scaled_product(left: Tensor, right: Tensor) -> Tensor:
    """left [n, I] times the transpose of right [O, I], in bf16, both quantised row by row."""
    rows, of_rows = quantised(left)
    columns, of_columns = quantised(right)
    if not left.is_cuda:  # torch's CPU kernel takes one scale for all
        product = rows.float() @ columns.float().t()
        return (product * of_rows * of_columns.t()).to(torch.bfloat16)
    return torch._scaled_mm(
        rows,
        columns.t(),
        scale_a=of_rows,
        scale_b=of_columns.t(),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [n, I] in e4m3 and what each row of them is to be multiplied with [n, 1]."""
    values = values.float()
    scale = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (values / scale).to(E4M3).contiguous(), scale


class Fp8Linear(nn.Linear):
    """A linear layer that trains in float8; in evaluation, and where autocast is off, it is a plain one."""

    def forward(self, x: Tensor) -> Tensor:
        """The outputs [..., O]."""
        return linear(x, self.weight, self.bias) if self.training else F.linear(x, self.weight, self.bias)


def use_fp8(block: nn.Module) -> None:
    """Let the linear layers in a block train in float8, in place."""
    from powerclip.encoders.self_attention import Packed

    for module in block.modules():
        if isinstance(module, Packed):
            module.fp8 = True
        if isinstance(module, nn.Linear):
            module.__class__ = Fp8Linear
