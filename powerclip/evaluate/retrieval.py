"""Retrieval: recall at k between images and captions, each image with one or several captions.

The definition is the field's (as in CLIP_benchmark): *text retrieval* asks with an image and hits when any of
its captions is among the k best; *image retrieval* asks with a caption and hits when its image is among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CUTOFFS = (1, 5, 10)


@dataclass(frozen=True)
class Retrieval:
    """Recall at each cutoff, as a share of the queries (0 to 1)."""

    text: dict[int, float]  # image → text
    image: dict[int, float]  # text → image

    @property
    def mean(self) -> float:
        """The mean over both directions and all cutoffs."""
        values = [*self.text.values(), *self.image.values()]
        return sum(values) / len(values)


def text_ranks(images: Tensor, captions: Tensor, image_of_caption: Tensor, block: int = 1024) -> Tensor:
    """For each image, how many captions of other images come before the best of its own.

    Ties count against the model, and so does NaN: a collapsed model must not look perfect.

    Args:
        images: normalised embeddings [images, D].
        captions: normalised embeddings [captions, D].
        image_of_caption: index of each caption's image [captions].
        block: images scored at once, the bound on memory.
    """
    _check(images, captions, image_of_caption)
    ranks = []
    for start in range(0, len(images), block):
        scores = images[start : start + block] @ captions.T
        rows = torch.arange(start, start + len(scores), device=images.device)
        own = image_of_caption == rows[:, None]
        best = scores.masked_fill(~own, -torch.inf).amax(1, keepdim=True)
        # `not less` instead of `greater or equal`: true for NaN.
        ranks.append((~(scores < best) & ~own).sum(1))
    return torch.cat(ranks)


def image_ranks(images: Tensor, captions: Tensor, image_of_caption: Tensor, block: int = 1024) -> Tensor:
    """For each caption, how many other images come before its own. Arguments and ties as in `text_ranks`."""
    _check(images, captions, image_of_caption)
    ranks = []
    for start in range(0, len(captions), block):
        scores = captions[start : start + block] @ images.T
        own = image_of_caption[start : start + block, None]
        ahead = ~(scores < scores.gather(1, own))
        ranks.append(ahead.sum(1) - ahead.gather(1, own)[:, 0].long())
    return torch.cat(ranks)


def recall(
    images: Tensor,
    captions: Tensor,
    image_of_caption: Tensor | None = None,
    cutoffs: Sequence[int] = CUTOFFS,
) -> Retrieval:
    """Recall at each cutoff, both ways. Without `image_of_caption`, caption i belongs to image i."""
    if image_of_caption is None:
        image_of_caption = torch.arange(len(captions), device=captions.device)
    to_text = text_ranks(images, captions, image_of_caption)
    to_image = image_ranks(images, captions, image_of_caption)
    return Retrieval(
        text={k: (to_text < k).double().mean().item() for k in cutoffs},
        image={k: (to_image < k).double().mean().item() for k in cutoffs},
    )


def _check(images: Tensor, captions: Tensor, image_of_caption: Tensor) -> None:
    if image_of_caption.shape != (len(captions),):
        raise ValueError(f"{len(captions)} captions, but image_of_caption is {tuple(image_of_caption.shape)}")
    covered = torch.bincount(image_of_caption, minlength=len(images))
    if len(covered) > len(images):
        raise ValueError(f"a caption points to image {len(covered) - 1}, but there are {len(images)} images")
    if (covered == 0).any():
        raise ValueError(f"image {int((covered == 0).nonzero()[0])} has no caption: leave it out")
