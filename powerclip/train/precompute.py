"""Tokens of a corpus's images behind the frozen blocks of the image tower, computed once: `train.precompute`.

A frozen block gives the same tokens for the same image in every epoch. Kept, they leave of a step what is trained: the
text tower, the blocks above and the head. Zhai et al., "LiT", CVPR 2022, precompute embeddings of locked towers alike.

Axes: C images · N patches · D width of the image tower
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.encoders.timm_tower import is_timm
from powerclip.encoders.vision import tokens_after
from powerclip.errors import UserError
from powerclip.runtime.progress import Progress
from powerclip.train.finetune import towers_of
from powerclip.train.sections import TrainSection
from powerclip.train.towers import in_bf16

if TYPE_CHECKING:
    from powerclip.data.corpus_loader import CorpusLoader
    from powerclip.encoders import DualEncoder
    from powerclip.objectives import Objective

CHUNK = 64  # images that pass the tower at a time


def check_precompute(encoder: DualEncoder, objective: Objective) -> None:
    """Raise `UserError` where a step needs an image's pixels, or the tower cannot begin at a block."""
    if is_timm(encoder.clip.visual):
        raise UserError("train.precompute is for open_clip's own image towers, and this one is timm's: leave it out")
    if objective.noise_shape(encoder) is not None:
        raise UserError(
            "train.precompute keeps what frozen blocks make of whole images, and this run chooses patches, views or "
            "mosaics anew in each step: leave one of the two out"
        )


def input_shape(settings: TrainSection, encoder: DualEncoder) -> tuple[int, ...]:
    """What the image tower is given of one image: the tokens (1+N, D) that are kept, or pixels (3, H, W)."""
    if settings.precompute:
        return (1 + encoder.grid[0] * encoder.grid[1], encoder.clip.visual.transformer.width)
    return (3, *encoder.image_size)


def precompute(loader: CorpusLoader, encoder: DualEncoder, settings: TrainSection, *, progress: bool = False) -> Tensor:
    """The tokens [images, 1+N, D] of all images of a corpus, whole, on the device of its batches."""
    depth, spec = encoder.blocks_before, loader.spec
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=torch.float64, device=spec.device)
    count = len(loader.corpus.keys)
    bf16 = in_bf16(settings, spec.device)
    kept: Tensor | None = None
    steps = Progress("precompute", count, unit="image", quiet=not progress)
    with steps, torch.no_grad(), torch.autocast(spec.device.type, torch.bfloat16) if bf16 else nullcontext():
        for first in range(0, count, CHUNK):
            numbers = torch.arange(first, min(first + CHUNK, count), device=spec.device)
            tokens = tokens_after(
                encoder.clip.visual, loader.crop_images(numbers, whole.expand(len(numbers), 4)), depth
            )
            kept = tokens.new_empty(count, *tokens.shape[1:]) if kept is None else kept
            kept[first : first + len(tokens)] = tokens
            steps.update(first + len(tokens))
    assert kept is not None
    return kept


def weights_before(encoder: DualEncoder, depth: int) -> str:
    """A digest of what makes the tokens: the weights of the image tower's embeddings and of its first blocks."""
    tower = towers_of(encoder)["image"]
    digest = hashlib.sha256()
    for parameter in [*tower.embeddings, *(p for block in tower.blocks[:depth] for p in block.parameters())]:
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
