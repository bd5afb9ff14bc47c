"""Where the class token of a vision transformer looks: the patch scores of attentive masking.

Axes: C images · N patches · D the tower's own width
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.encoders.timm_tower import is_timm
from powerclip.encoders.vision import embed_image, pool
from powerclip.errors import UserError


def check_class_attention(visual: Any) -> None:
    """Raise `UserError` when the tower's class token says nothing about its patches."""
    if is_timm(visual):
        raise UserError("attention scores need open_clip's own ViT, and the image tower is timm's")
    if visual.pool_type != "tok":
        raise UserError(
            f"attention scores need a class token that is pooled, and the image tower has pool_type "
            f"{visual.pool_type!r} (choose 'tok')"
        )
    if getattr(visual.transformer.resblocks[0].attn, "logit_scale", None) is not None:
        raise UserError("attention scores need plain attention (leave scaled_cosine_attn out of the model config)")


def forward_attention(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Pooled [C, D], before the projection, and the class token's attention [C, N], mean over heads and layers."""
    x = visual.ln_pre(torch.cat(embed_image(visual, images), dim=1))
    blocks = visual.transformer.resblocks
    total = x.new_zeros(x.shape[0], x.shape[1] - 1, dtype=torch.float32)
    for block in blocks:
        total = total + class_attention(block, x)
        x = block(x)
    pooled = visual.ln_post(pool(visual, x)) if visual.final_ln_after_pool else pool(visual, visual.ln_post(x))
    return pooled, total / len(blocks)


def class_attention(block: Any, x: Tensor) -> Tensor:
    """The attention [C, N] from the first token to the others in one block, mean over heads, for its input [C, 1+N, D].

    Fused attention keeps no weights, so the one row that is needed is computed beside it.
    """
    attention = block.attn
    query_weight, key_weight, _ = attention.in_proj_weight.chunk(3)
    bias = attention.in_proj_bias
    query_bias, key_bias, _ = (None, None, None) if bias is None else bias.chunk(3)
    x = block.ln_1(x)
    query = F.linear(x[:, :1], query_weight, query_bias).unflatten(-1, (attention.num_heads, -1))
    key = F.linear(x, key_weight, key_bias).unflatten(-1, (attention.num_heads, -1))
    if hasattr(attention, "ln_q"):  # open_clip's own attention may normalise both
        query, key = attention.ln_q(query), attention.ln_k(key)
    logits = torch.einsum("cqhd,ckhd->chk", query, key).float() / query.shape[-1] ** 0.5
    return logits.softmax(dim=-1)[..., 1:].mean(dim=1)
