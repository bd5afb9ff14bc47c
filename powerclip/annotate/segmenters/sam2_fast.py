"""SAM 2's decoder as transformers has it, with its weights in ours: for the kernels of `sam_fast.py`.

It is SAM's, with one token more and finer features that are added on the way to the finest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from powerclip.annotate.segmenters.sam_decoder import MASKS, MaskDecoder, PointEncoder
from powerclip.annotate.segmenters.sam_fast import Encoded
from powerclip.annotate.segmenters.tiny_vit import FEATURES

# transformers' names → ours, in this order.
_RENAMED = [
    (r"o_proj\.", "out_proj."),
    (r"layer_norm_final_attn", "norm_final_attn"),
    (r"layer_norm(\d)", r"norm\1"),
    (r"\.mlp\.proj_in\.", ".mlp.lin1."),
    (r"\.mlp\.proj_out\.", ".mlp.lin2."),
    (r"((?:mlps\.\d|head)\.)layers\.0\.", r"\1layers.1."),
    (r"((?:mlps\.\d|head)\.)proj_in\.", r"\1layers.0."),
    (r"((?:mlps\.\d|head)\.)proj_out\.", r"\1layers.2."),
    (r"^upscale_conv1\.", "output_upscaling.0."),
    (r"^upscale_layer_norm\.", "output_upscaling.1."),
    (r"^upscale_conv2\.", "output_upscaling.3."),
]
_ELSEWHERE = ("conv_s0.", "conv_s1.", "pred_obj_score_head.")  # the encoder applies them; not asked


def is_known(network: Any) -> bool:
    """Whether the decoder has the released models' sizes, which the kernels are made for."""
    decoder = network.config.mask_decoder_config
    sizes = decoder.hidden_size, decoder.num_attention_heads, decoder.mlp_dim, decoder.num_multimask_outputs
    return sizes == (FEATURES, 8, 2048, MASKS) and decoder.attention_downsample_rate == 2


def mask_decoder(network: Any) -> MaskDecoder:
    """The decoder of a `Sam2Model`."""
    weights = {}
    for name, value in network.mask_decoder.state_dict().items():
        if not name.startswith(_ELSEWHERE):
            for pattern, replacement in _RENAMED:
                name = re.sub(pattern, replacement, name)
            weights[name] = value
    decoder = MaskDecoder(scores_objects=True)
    decoder.load_state_dict(weights)
    return decoder.to(network.device).eval().requires_grad_(False)


def point_encoder(network: Any) -> PointEncoder:
    """The prompt encoder of a `Sam2Model`, for points."""
    theirs, encoder = network.prompt_encoder, PointEncoder()
    with torch.no_grad():
        encoder.pe_layer.positional_encoding_gaussian_matrix.copy_(theirs.shared_embedding.positional_embedding)
        encoder.not_a_point_embed.weight.copy_(theirs.not_a_point_embed.weight)
        encoder.no_mask_embed.weight.copy_(theirs.no_mask_embed.weight)
        for ours, row in zip(encoder.point_embeddings, theirs.point_embed.weight, strict=True):
            next(ours.parameters()).copy_(row)
    return encoder.to(network.device).eval().requires_grad_(False)


def encoded(features: Sequence[Tensor], prompts: PointEncoder, dtype: torch.dtype) -> Encoded:
    """Features [B, D/8, 4h, 4w], [B, D/4, 2h, 2w] and [B, D, h, w] as the kernels take them."""
    finest, finer, image = features
    height, width = image.shape[-2:]
    rows, columns = (torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width
    places = prompts.pe_layer(torch.cartesian_prod(rows, columns).flip(-1).to(image.device))
    without_mask = image.float() + prompts.no_mask_embed.weight[0, :, None, None]
    quarters = finer.unflatten(-1, (-1, 2)).unflatten(2, (-1, 2))  # [B, D/4, h, 2, w, 2]
    sixteenths = finest.unflatten(-1, (-1, 2, 2)).unflatten(2, (-1, 2, 2))  # [B, D/8, h, 2, 2, w, 2, 2]
    return Encoded(
        without_mask.flatten(2).mT.to(dtype).contiguous(),
        places.to(dtype),
        width,
        (
            quarters.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2).to(dtype).contiguous(),
            sixteenths.permute(0, 2, 5, 3, 6, 4, 7, 1).flatten(3, 6).flatten(1, 2).to(dtype).contiguous(),
        ),
    )
