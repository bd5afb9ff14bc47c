"""A page with two tiny random models, as tests of the server and of the browser use it."""

from __future__ import annotations

from pathlib import Path

import torch

from powerclip.demo.engine import Engine
from powerclip.demo.pictures import PictureStore
from powerclip.encoders import build, preprocess_for, tokenizer_for
from powerclip.evaluate.ground import GroundingModel

CAPTION = "a red star above a blue ring"


def tiny_model(name: str, seed: int) -> GroundingModel:
    torch.manual_seed(seed)
    tower = {"width": 32, "layers": 1}
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "head_width": 16, **tower},
        "text_cfg": {"context_length": 32, "vocab_size": 49408, "heads": 2, **tower},
    }
    encoder = build(config=config).eval()
    return GroundingModel.of((encoder, preprocess_for(encoder), tokenizer_for(encoder)), name)


def tiny_engine(folder: Path | None = None) -> Engine:
    return Engine([tiny_model("one", 0), tiny_model("two", 1)], PictureStore(folder))
