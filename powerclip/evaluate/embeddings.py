"""Global embeddings of many images and captions: what every zero-shot benchmark begins with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.data.pixels import Normaliser, squash
from powerclip.data.tokens import CaptionTokenizer

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

BATCH = 250


def device_of(encoder: DualEncoder) -> torch.device:
    """Where the encoder's weights are."""
    return next(encoder.parameters()).device


@contextmanager
def evaluating(encoder: DualEncoder) -> Iterator[None]:
    """The encoder in evaluation mode, without gradients; afterwards as it was."""
    training = encoder.training
    encoder.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        encoder.train(training)


def embed_texts(encoder: DualEncoder, tokenizer: CaptionTokenizer, texts: Sequence[str]) -> Tensor:
    """Embeddings [texts, D] of captions."""
    device = device_of(encoder)
    parts = []
    for start in range(0, len(texts), BATCH):
        tokens = tokenizer.pad([tokenizer.encode(text).ids for text in texts[start : start + BATCH]])
        parts.append(encoder.encode_text(tokens.to(device)).float())
    return torch.cat(parts)


def embed_images(encoder: DualEncoder, images: Tensor) -> Tensor:
    """Embeddings [images, D] of whole images [images, 3, H, W] uint8, squashed to the size that the tower reads."""
    device = device_of(encoder)
    wants = encoder.clip.visual.preprocess_cfg
    normalise = Normaliser(wants["mean"], wants["std"], device)
    parts = [
        encoder.encode_image(normalise(squash(part.to(device), encoder.image_size))).float()
        for part in images.split(BATCH)
    ]
    return torch.cat(parts)
