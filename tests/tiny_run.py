"""A recipe small enough to run in a second, shared by the tests of training."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from powerclip.train.recipe import Recipe, load_recipe

TEXT = """
model:
  config:
    embed_dim: 16
    vision_cfg: {image_size: 16, patch_size: 8, width: 16, layers: 1, head_width: 8}
    text_cfg: {context_length: 40, vocab_size: 49408, width: 8, heads: 1, layers: 1}
optim: {lr: 1e-3, warmup: 1}
regions: {count: 3}
train: {steps: 12, batch_size: 4, device: cpu, log_every: 2, checkpoint_every: 5}
"""


def write_tiny(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def tiny(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(write_tiny(folder), overrides)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "open_clip_model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
