"""Tiny towers of every kind that the encoders read, and batches for them."""

import copy
from typing import Any

import torch
from torch import Tensor

CONTEXT = 16
VOCABULARY = 100
END = VOCABULARY - 1  # as in CLIP, the end of text is the largest id

TINY: dict[str, Any] = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": [32, 48], "patch_size": 8, "width": 32, "head_width": 16, "layers": 2},
    "text_cfg": {"context_length": CONTEXT, "vocab_size": VOCABULARY, "width": 40, "heads": 2, "layers": 2},
}

# What varies between open_clip's ViT models, as (top level, vision_cfg, text_cfg).
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "clip": ({}, {}, {}),
    "custom-text": ({"custom_text": True}, {}, {}),
    "avg-pool": ({}, {"pool_type": "avg"}, {}),
    "clipa": (
        {"custom_text": True},
        {"pool_type": "avg", "final_ln_after_pool": True, "no_ln_pre": True},
        {"pool_type": "last", "no_causal_mask": True},
    ),
    "bidirectional": ({}, {}, {"no_causal_mask": True}),
    "ln-after-tok": ({"quick_gelu": True}, {"final_ln_after_pool": True}, {}),
    "eos-pool": ({"custom_text": True}, {}, {"pool_type": "eos", "eos_id": END}),
    "eos-pool-clip": ({}, {}, {"pool_type": "eos", "eos_id": END}),
    "last-pool-causal": ({}, {}, {"pool_type": "last"}),
    "class-token": ({"custom_text": True}, {}, {"embed_cls": True}),
    "linear-projection": ({"custom_text": True}, {}, {"proj_bias": True}),
    "no-projection": ({"custom_text": True}, {}, {"proj_type": "none", "width": 24}),
    "custom-blocks": ({}, {"qk_norm": True, "ls_init_value": 0.1}, {"scale_attn": True}),
    "sigmoid": ({"init_logit_bias": -10.0, "nonscalar_logit_scale": True}, {}, {}),
}


def tiny_config(variant: str = "clip") -> dict[str, Any]:
    top, vision, text = VARIANTS[variant]
    config = copy.deepcopy(TINY) | top
    config["vision_cfg"] |= vision
    config["text_cfg"] |= text
    return config


def captions(*lengths: int, width: int = CONTEXT, seed: int = 0) -> Tensor:
    """Token rows of the given lengths, end of text included, padded with 0 to `width`."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in zip(rows, lengths, strict=True):
        row[: length - 1] = torch.randint(1, END, (length - 1,), generator=generator)
        row[length - 1] = END
    return rows
