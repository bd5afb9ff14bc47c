"""Linear layers whose products are in float8 on the tensor cores: `train.precision: fp8`, the towers' blocks only.

    y = x Wᵀ + b and ∂x = ∂y W in float8 e4m3, summed in float32 and given in bf16; ∂W = ∂yᵀ x in bf16.

Each row of a factor has its own scale, its largest number over the largest of e4m3, 448, taken anew in every product:
nothing is remembered from step to step. A row of x is a token, a row of W an output; for ∂x each column of W has its
scale. ∂W sums over all tokens, for which every column of ∂y and x would need a scale: two more passes over both. It
stays in bf16.

Weights stay as they are, under their names; norms, attention, embeddings and projections do not change, nor does
evaluation: a layer is a plain one unless it trains.

Axes: … any · n tokens · I inputs · O outputs
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from powerclip.errors import UserError

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST = 1e-12  # a row's scale times LARGEST, where it is all zeros

# What the tensor cores ask of inputs and outputs, and of the GPU: its compute capability.
MULTIPLE = 16
CAPABILITY = (8, 9)

log = logging.getLogger(__name__)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of x [..., I] as bf16 [..., O], with products in float8."""
    return _Fp8Linear.apply(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_y = gradients[0]
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = scaled_product(of_y, weight.t()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (of_y.to(torch.bfloat16).t() @ x.to(torch.bfloat16)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = of_y.sum(0, dtype=torch.float32)
        return of_x, of_weight, of_bias


def scaled_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left [n, I] times the transpose of right [O, I], plus a bias [O], in bf16; both are quantised row by row."""
    rows, of_rows = quantised(left)
    columns, of_columns = quantised(right)
    if not left.is_cuda:  # torch's own product on a CPU has one scale for a matrix
        product = (rows.float() @ columns.float().t()) * of_rows * of_columns.t()
        return (product if bias is None else product + bias.to(torch.bfloat16)).to(torch.bfloat16)
    return torch._scaled_mm(
        rows,
        columns.t(),
        scale_a=of_rows,
        scale_b=of_columns.t(),
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def quantised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [n, I] in e4m3, and what each row of them is to be multiplied with [n, 1]."""
    values = values.float()
    scale = values.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return (values / scale).to(E4M3).contiguous(), scale


class Fp8Linear(nn.Linear):
    """A linear layer that trains in float8 and evaluates as it always did."""

    def forward(self, x: Tensor) -> Tensor:
        """The outputs [..., O] of inputs [..., I]."""
        return (linear if self.training else F.linear)(x, self.weight, self.bias)


def use_fp8(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Let the linear layers in transformer blocks train in float8; weights stay as they are.

    Layers that do not train are left alone, and one line says how many do not fit.

    Raises:
        UserError: the device has no float8 products.
    """
    if obstacle := why_not(device):
        raise UserError(f"train.precision: fp8 {obstacle}; take bf16")
    from powerclip.encoders.self_attention import Packed

    left = 0
    for module in (module for block in blocks for module in block.modules()):
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim != 2 or not weight.requires_grad:
                continue
            fits = all(size % MULTIPLE == 0 for size in weight.shape)
            if fits and name == "in_proj_weight" and isinstance(module, Packed):
                module.fp8 = True
            elif fits and type(module) in (nn.Linear, NonDynamicallyQuantizableLinear):
                module.__class__ = Fp8Linear
            else:
                left += 1
    if left:
        log.warning("%d weights of the blocks stay in bf16: float8 takes linear layers of multiples of 16", left)


def why_not(device: torch.device) -> str | None:
    """Why a device cannot multiply in float8; None when it can."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, and this runs on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        needs, has = (".".join(map(str, version)) for version in (CAPABILITY, capability))
        return f"needs a GPU of compute capability {needs}, and {torch.cuda.get_device_name(device)} has {has}"
    return None
