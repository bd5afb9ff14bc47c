"""Late interaction: every patch meets every token of every caption, and nothing of that size is kept.

All C² · N · L similarities are formed in blocks of images. What is remembered for the gradient is where each maximum
was, one byte for each pair and patch and for each pair and token: the gradient of a maximum goes to one place, so that
it is two matrix products with a sparse matrix, which is made in blocks again.

Axes: C images and captions · B images of a block · N patches · L tokens · D width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Elements of a block of similarities: 256 MiB in bf16, far beyond what a matrix product needs to be efficient.
BLOCK_ELEMENTS = 2**27


def late_interaction(patches: Tensor, words: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Similarities of all images with all captions, both [images, captions] and float32.

        image to text: mean over patches of the maximum over tokens
        text to image: mean over tokens of the maximum over patches

    Args:
        patches: [C, N, D] normalised.
        words: [C, L, D] normalised, finite; in the type of `patches`, which is what they are multiplied in.
        real: [C, L] bool, the tokens that count; at least one in each caption.
    """
    # A token that does not count becomes a copy of one that does: no maximum changes and nothing has to be masked.
    stand_in = torch.where(real, torch.arange(real.shape[1], device=real.device), real.int().argmax(1, keepdim=True))
    words = words.gather(1, stand_in.unsqueeze(-1).expand_as(words))
    return _LateInteraction.apply(patches, words, real)  # type: ignore[no-any-return, no-untyped-call]


class _LateInteraction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, patches: Tensor, words: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        share = real.float() / real.sum(dim=1, keepdim=True)  # [C, L] of each token in its caption's mean
        parts = [_on(patches, _maxima)(patches[rows], words, share) for rows in _blocks(patches, words)]
        image_to_text, text_to_image, best_word, best_patch = (torch.cat(part) for part in zip(*parts, strict=True))
        context.save_for_backward(patches, words, share, best_word, best_patch)
        return image_to_text, text_to_image

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, to_text: Tensor, to_image: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        patches, words, share, best_word, best_patch = context.saved_tensors
        flat_words = words.flatten(0, 1)
        patch_gradient, word_gradient = torch.empty_like(patches), torch.zeros_like(flat_words, dtype=torch.float32)
        for rows in _blocks(patches, words):
            weights = _on(patches, _weights)(
                best_word[rows], best_patch[rows], to_text[rows], to_image[rows], share, patches.dtype
            )
            weights = weights.flatten(2).flatten(0, 1)  # [B·N, C·L]
            patch_gradient[rows] = (weights @ flat_words).unflatten(0, (-1, patches.shape[1]))
            word_gradient += weights.T @ patches[rows].flatten(0, 1)
        return patch_gradient, word_gradient.to(words.dtype).view_as(words), None


def _blocks(patches: Tensor, words: Tensor) -> Iterator[slice]:
    """Ranges of images whose similarities fit into a block."""
    size = max(1, BLOCK_ELEMENTS // max(1, patches.shape[1] * words.shape[0] * words.shape[1]))
    for start in range(0, len(patches), size):
        yield slice(start, start + size)


def _maxima(patches: Tensor, words: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both similarities [B, C] of a block, the best word [B, N, C] and the best patch [B, C, L]."""
    similarity = (patches.flatten(0, 1) @ words.flatten(0, 1).T).view(*patches.shape[:2], *words.shape[:2])
    best_over_words, best_word = similarity.max(dim=3)
    best_over_patches, best_patch = similarity.max(dim=1)
    return (
        best_over_words.float().mean(dim=1),
        (best_over_patches.float() * share).sum(dim=2),
        best_word.to(_index_type(words.shape[1])),
        best_patch.to(_index_type(patches.shape[1])),
    )


def _weights(
    best_word: Tensor, best_patch: Tensor, to_text: Tensor, to_image: Tensor, share: Tensor, dtype: torch.dtype
) -> Tensor:
    """The gradient of a block's similarities [B, N, C, L], zero but where a maximum was."""
    count, length = best_word.shape[1], best_patch.shape[2]
    token = torch.arange(length, device=share.device, dtype=best_word.dtype)
    patch = torch.arange(count, device=share.device, dtype=best_patch.dtype)
    by_word = torch.where(best_word.unsqueeze(3) == token, (to_text / count).to(dtype)[:, None, :, None], 0)
    by_patch = (to_image.unsqueeze(-1) * share).to(dtype)  # [B, C, L]
    return by_word + torch.where(best_patch.unsqueeze(1) == patch[:, None, None], by_patch.unsqueeze(1), 0)


def _index_type(size: int) -> torch.dtype:
    return torch.uint8 if size <= 256 else torch.int16


def _on(tensor: Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled where a GPU would otherwise read each block from memory several times."""
    return _compiled(function) if tensor.is_cuda else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
