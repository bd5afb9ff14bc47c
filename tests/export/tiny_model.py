"""Tiny towers with CLIP's vocabulary, saved as a model folder: what the tests of exports have in common."""

from __future__ import annotations

from pathlib import Path

import torch

from powerclip.encoders import DualEncoder, build, save

TOWERS = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2},
    "text_cfg": {"context_length": 40, "vocab_size": 49408, "width": 24, "heads": 2, "layers": 2},
}


def tiny_model(**text: object) -> DualEncoder:
    torch.manual_seed(0)
    return build(config={**TOWERS, "text_cfg": {**TOWERS["text_cfg"], **text}}).eval()


def save_tiny_model(folder: Path) -> Path:
    return save(tiny_model(), folder)


def captions_of_lengths(*lengths: int) -> list[torch.Tensor]:
    """For each length, two rows of token ids that end where they should."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 49406, (2, length), generator=generator) for length in lengths]
    for row in rows:
        row[:, -1] = 49407
    return rows
