"""The towers' attention as training runs it: open_clip's weights, fewer copies, and kernels without known faults.

torch's `nn.MultiheadAttention` copies queries, keys and values on their way in, and their gradients on the way back: 10
of 165 ms of a ViT-B/16's step on an H200. Fused kernels read them where the projection wrote them.

open_clip 3 has torch's layers in its blocks, open_clip 4 its own, with the same weights under the same names: both are
served.

Axes: C rows · N tokens · H heads · D width
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from powerclip.encoders import fp8

# cuDNN's attention may give NaN gradients in bf16 on Hopper from torch 2.11 on (pytorch issue 196678): with a mask, at
# some lengths, when the logits are low. Without a mask it is the fastest there is.
MASKED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# The names of the attention layers in open_clip's blocks.
_IN_BLOCK = re.compile(r"resblocks\.\d+\.attn$")

log = logging.getLogger(__name__)


class Packed:
    """An attention layer that reads queries, keys and values where its projection wrote them.

    A mask [C] says how many tokens of each row are there: the rest comes after them.
    """

    in_proj_weight: Any
    in_proj_bias: Any
    num_heads: Any
    out_proj: Any
    training: bool
    fp8 = False  # whether the projection of queries, keys and values trains in float8

    def attend(self, x: Tensor, attn_mask: Tensor | None) -> Tensor:
        """The tokens [C, N, D] after they attended to each other."""
        linear = fp8.linear if self.fp8 and self.training else F.linear
        packed = linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.num_heads, -1))
        if attn_mask is not None and attn_mask.ndim == 1:
            return self.out_proj(attend_in_groups(packed, attn_mask).flatten(2))
        q, k, v = packed.permute(2, 0, 3, 1, 4)  # [C, H, N, D/H] each, none of them moved
        if attn_mask is not None:
            # Torch's masks are [N, N], or [C·H, N, N] when rows differ.
            attn_mask = attn_mask.unflatten(0, (len(x), -1)) if attn_mask.ndim == 3 else attn_mask
            attn_mask = attn_mask.to(q.dtype)
        with sdpa_kernel(MASKED) if attn_mask is not None and q.is_cuda else contextlib.nullcontext():
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class SelfAttention(Packed, nn.MultiheadAttention):
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
        """The attended tokens [C, N, D]; the weights only where they are asked for, by torch's own implementation."""
        plain = query is key and key is value and not need_weights and key_padding_mask is None
        if not plain or query.ndim != 3:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        return self.attend(query, attn_mask), None


class OwnAttention(Packed):
    """open_clip's own attention layer with the faster path; mixed into its class, whichever release it is from."""

    def forward(
        self, x: Tensor, k_x: Tensor | None = None, v_x: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """The attended tokens [C, N, D]; other keys or values than `x` go through open_clip's own implementation."""
        if all(other is None or other is x for other in (k_x, v_x)):
            return self.attend(x, attn_mask)
        own: Any = super()
        return own.forward(x, k_x=k_x, v_x=v_x, attn_mask=attn_mask)


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
    """Let the attention layers in `towers` run the faster path where possible; weights stay as they are.

    Where a block's layer is of another kind, one line says how many are and why. The numbers are the same.
    """
    for module in towers.modules():
        if type(module) is nn.MultiheadAttention and _is_plain(module):
            module.__class__ = SelfAttention
        elif _is_open_clips(module) and not _own_features(module):
            kind: Any = type(module)
            module.__class__ = _packed_kind(kind)
    others = [m for name, m in towers.named_modules() if _IN_BLOCK.search(name) and not isinstance(m, Packed)]
    for reason in sorted({_why_not(module) for module in others}):
        _say_once(f"{len(others)} attention layers do not run the fast path ({reason}): slower, with the same results")


@functools.cache
def _say_once(line: str) -> None:
    log.warning(line)


@functools.cache
def _packed_kind(kind: Any) -> Any:
    return type(f"Packed{kind.__name__}", (OwnAttention, kind), {})


def _is_plain(attention: Any) -> bool:
    """Whether one of torch's attention layers is the plain kind that open_clip makes."""
    plain = attention.batch_first and attention.dropout == 0 and attention.bias_k is None
    return plain and attention._qkv_same_embed_dim and not attention.add_zero_attn


def _is_open_clips(module: nn.Module) -> bool:
    """Whether a layer is open_clip's own self-attention, with one matrix for queries, keys and values."""
    kind = type(module)
    own = kind.__name__ == "Attention" and kind.__module__.split(".")[0] == "open_clip"
    return own and getattr(module, "in_proj_weight", None) is not None


def _own_features(attention: Any) -> list[str]:
    """What open_clip's own attention layer does beyond plain attention."""

    def is_set(name: str) -> bool:
        part = getattr(attention, name, None)
        return part is not None and not isinstance(part, nn.Identity)

    names = {"ln_q": "qk_norm", "logit_scale": "scaled_cosine_attn", "head_scale": "scale_heads"}
    features = [setting for name, setting in (names | {"ln_inner": "scale_attn_inner"}).items() if is_set(name)]
    dropout = any(getattr(getattr(attention, name, None), "p", 0) for name in ("attn_drop", "out_drop"))
    return features + ["dropout"] * dropout


def _why_not(attention: nn.Module) -> str:
    if _is_open_clips(attention):
        return f"they have {' and '.join(_own_features(attention))}"
    if isinstance(attention, nn.MultiheadAttention):
        return "they have dropout, biases of their own for keys, or separate projections"
    return f"they are {type(attention).__module__}.{type(attention).__name__}, which this version does not know"
