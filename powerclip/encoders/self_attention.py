"""The towers' attention as training runs it: open_clip's weights, fewer copies, and kernels without known faults.

torch's `nn.MultiheadAttention` copies queries, keys and values on their way in, and their gradients on the way back: 10
of 165 ms of a ViT-B/16's step on an H200. Fused kernels read them where the projection wrote them.

Axes: C rows · N tokens · H heads · D width
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's attention may give NaN gradients in bf16 on Hopper from torch 2.11 on (pytorch issue 196678): with a mask, at
# some lengths, when the logits are low. Without a mask it is the fastest there is.
MASKED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SelfAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with a faster path where a sequence attends to itself."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The attended tokens [C, N, D]; the weights only where they are asked for, by torch's own implementation.

        A mask [C] says how many tokens of each row are there: the rest comes after them.
        """
        plain = query is key and key is value and not need_weights and key_padding_mask is None
        if not plain or query.ndim != 3:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        packed = F.linear(query, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
        if attn_mask is not None and attn_mask.ndim == 1:
            return self.out_proj(attend_in_groups(packed, attn_mask).flatten(2)), None
        q, k, v = packed.permute(2, 0, 3, 1, 4)  # [C, H, N, D/H] each, none of them moved
        if attn_mask is not None:
            # Torch's masks are [N, N], or [C·H, N, N] when rows differ.
            attn_mask = attn_mask.unflatten(0, (len(query), -1)) if attn_mask.ndim == 3 else attn_mask
            attn_mask = attn_mask.to(q.dtype)
        with sdpa_kernel(MASKED) if attn_mask is not None and q.is_cuda else contextlib.nullcontext():
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


def attend_in_groups(packed: Tensor, lengths: Tensor) -> Tensor:
    """Attention within two groups of each row: its first tokens, `lengths` [C] of them, and the rest; [C, N, H, D/H].

    Queries, keys and values come as the projection wrote them [C, N, 3, H, D/H].
    """
    count, total = packed.shape[:2]
    if packed.is_cuda and packed.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        # Sequences of different lengths that lie end to end, two in each row: no mask is read, nothing is padded.
        starts = torch.arange(0, count * total, total, device=packed.device, dtype=torch.int32)
        bounds = F.pad(torch.stack([starts, starts + lengths.int()], 1).flatten(), (0, 1), value=count * total)
        q, k, v = packed.flatten(0, 1).unbind(1)
        return varlen_attn(q, k, v, bounds, bounds, total, total).unflatten(0, (count, -1))  # type: ignore[union-attr]
    first = torch.arange(total, device=packed.device) < lengths.unsqueeze(-1)  # [C, N]
    same_group = (first.unsqueeze(1) == first.unsqueeze(2)).unsqueeze(1)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, same_group).transpose(1, 2)


def use_packed_attention(towers: nn.Module) -> None:
    """Turn torch's attention layers in `towers` into `SelfAttention` where possible; weights stay as they are."""
    for module in towers.modules():
        if type(module) is nn.MultiheadAttention and _is_plain(module):
            module.__class__ = SelfAttention


def _is_plain(attention: Any) -> bool:
    """Whether an attention layer is the plain kind that open_clip makes."""
    plain = attention.batch_first and attention.dropout == 0 and attention.bias_k is None
    return plain and attention._qkv_same_embed_dim and not attention.add_zero_attn
