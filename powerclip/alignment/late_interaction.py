"""Late interaction: every patch is compared with every token of every caption, without storing all similarities.

All C² · N · L similarities are formed in blocks of images and groups of captions. What is kept for the gradient
is where each maximum was, one byte for each pair and patch and for each pair and token: the gradient of a maximum goes
to one place, so that it is two matrix products with a sparse matrix, which is made in blocks again.

The cost is that of the tokens, padding included, and most captions are half as long as the longest. So captions are
compared in eight groups from short to long, each as long as its own longest. A GPU sorts them; where the groups end
must be known to the host, which would have to wait for the GPU to learn it: hence `lengths`.

Axes: C images and captions · B images of a block · G captions of a group · N patches · L tokens · T tokens of all
captions, each as long as its group · D width
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from powerclip.runtime.compile import compile_shapes

# Elements of a block of similarities: 256 MiB in bf16, far beyond what a matrix product needs to be efficient.
BLOCK_ELEMENTS = 2**27
# More groups save little: those of 512 scenes' captions hold 24.0 tokens a caption in eight groups, 23.1 in sixteen.
GROUPS = 8
# A group's length is a multiple of it: few shapes to compile for, and well-shaped matrices.
LENGTH_MULTIPLE = 8


def late_interaction(
    patches: Tensor, words: Tensor, real: Tensor, lengths: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Similarities of all images with all captions, both [images, captions] and float32.

        image to text: mean over patches of the maximum over tokens
        text to image: mean over tokens of the maximum over patches

    Args:
        patches: [C, N, D] normalised.
        words: [C, L, D] normalised, finite; in the type of `patches`, which is what they are multiplied in.
        real: [C, L] bool, the tokens that count; at least one in each caption.
        lengths: how many tokens each caption has at most, in any order; L when empty.

    Raises:
        ValueError: when there is not one length for each caption.
        RuntimeError: when captions are longer than `lengths` say; on a GPU a device-side assertion.
    """
    captions, longest = real.shape
    if lengths and len(lengths) != captions:
        raise ValueError(f"{len(lengths)} lengths for {captions} captions")
    groups = _groups(lengths or [longest] * captions, longest)
    positions = torch.arange(longest, device=real.device)
    # By the last token that counts. Any order of `lengths` will do: if they are bounds, they still are when both are
    # sorted.
    order = torch.where(real, positions, 0).amax(1).argsort()
    share = _pack(_shares(real)[order], groups)
    torch._assert_async((share > 0).sum() == real.sum(), "captions are longer than `lengths` say")
    source = _pack(_stand_ins(real)[order] + longest * order.unsqueeze(1), groups)
    packed = words.flatten(0, 1).index_select(0, source)
    image_to_text, text_to_image = _LateInteraction.apply(patches, packed, share, groups)  # type: ignore[no-untyped-call]
    inverse = order.argsort()
    return image_to_text.index_select(1, inverse), text_to_image.index_select(1, inverse)


@torch.no_grad()
def late_scores(patches: Tensor, words: Tensor, real: Tensor, block_elements: int = 2**24) -> tuple[Tensor, Tensor]:
    """The similarities of `late_interaction`, image to text and text to image, for scoring: nothing else is kept.

    Captions are as long as the longest of them: sort them by length. `block_elements` bounds a block of similarities.
    """
    share, packed = _shares(real), _with_stand_ins(words, real)
    blocks = [_maxima(patches[rows], packed, share)[:2] for rows in _blocks(patches, words, block_elements)]
    image_to_text, text_to_image = zip(*blocks, strict=True)
    return torch.cat(image_to_text), torch.cat(text_to_image)


@torch.no_grad()
def late_pair_scores(patches: Tensor, words: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The same of n selected pairs, both [n], of patches [n, N, D] with words [n, L, D] of which [n, L] count."""
    similarity = patches @ _with_stand_ins(words, real).mT  # [n, N, L]
    return similarity.amax(2).float().mean(1), (similarity.amax(1).float() * _shares(real)).sum(1)


def _shares(real: Tensor) -> Tensor:
    """The weight of each token [C, L] in its caption's mean; of those that do not count 0."""
    return real.float() / real.sum(dim=1, keepdim=True)


def _stand_ins(real: Tensor) -> Tensor:
    """The position of each token [C, L] or, of one that does not count, of one that does.

    With a copy of that in its place no maximum changes and nothing has to be masked.
    """
    return torch.where(real, torch.arange(real.shape[1], device=real.device), real.int().argmax(1, keepdim=True))


def _with_stand_ins(words: Tensor, real: Tensor) -> Tensor:
    return words.gather(1, _stand_ins(real).unsqueeze(-1).expand_as(words))


def group_lengths(lengths: Sequence[int]) -> list[int]:
    """The longest of each group of captions, which are formed from short to long."""
    size = _group_size(len(lengths))
    ordered = sorted(lengths)
    return [ordered[start : start + size][-1] for start in range(0, len(ordered), size)]


def expand_lengths(groups: Sequence[int], captions: int) -> list[int]:
    """A length for each caption that none exceeds, from the `group_lengths` of captions."""
    return [groups[number // _group_size(captions)] for number in range(captions)]


def _group_size(captions: int) -> int:
    """How many captions make a group; the last one may have fewer."""
    return -(-captions // GROUPS)


def _groups(lengths: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Captions and padded tokens of each group; groups of one length are not merged, which would give more shapes."""
    size = _group_size(len(lengths))
    return [
        (min(size, len(lengths) - number * size), min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, longest))
        for number, length in enumerate(group_lengths(lengths))
    ]


def _pack(values: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
    """The values [T] that the groups hold, from values [C, L] in the order of the groups."""
    rows = values.split([size for size, _ in groups])
    return torch.cat([part[:, :length].flatten() for part, (_, length) in zip(rows, groups, strict=True)])


def _unpack(values: Tensor, groups: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Values [T, …] as a view [G, L, …] for each group."""
    parts = values.split([size * length for size, length in groups])
    return [part.unflatten(0, group) for part, group in zip(parts, groups, strict=True)]


class _LateInteraction(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, patches: Tensor, words: Tensor, share: Tensor, groups: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, Tensor]:
        parts, maxima = [], _compiled_on_gpu(patches, _maxima)
        for group, of_caption in zip(_unpack(words, groups), _unpack(share, groups), strict=True):
            blocks = [maxima(patches[rows], group, of_caption) for rows in _blocks(patches, group)]
            parts.append([torch.cat(block) for block in zip(*blocks, strict=True)])
        image_to_text, text_to_image, best_word, best_patch = zip(*parts, strict=True)
        context.groups = groups
        context.save_for_backward(patches, words, share, *best_word, *best_patch)
        return torch.cat(image_to_text, 1), torch.cat(text_to_image, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, to_text: Tensor, to_image: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        patches, words, share, *best = context.saved_tensors
        groups = context.groups
        sizes = [size for size, _ in groups]
        # Sums over groups and over blocks: in float32.
        patch_gradient = torch.zeros_like(patches, dtype=torch.float32)
        word_gradient = torch.zeros_like(words, dtype=torch.float32)
        for group, gradient, of_caption, best_word, best_patch, of_text, of_image in zip(
            _unpack(words, groups),
            _unpack(word_gradient, groups),
            _unpack(share, groups),
            best[: len(groups)],
            best[len(groups) :],
            to_text.split(sizes, dim=1),
            to_image.split(sizes, dim=1),
            strict=True,
        ):
            for rows in _blocks(patches, group):
                weights = _compiled_on_gpu(patches, _weights)(
                    best_word[rows], best_patch[rows], of_text[rows], of_image[rows], of_caption, patches.dtype
                )
                weights = weights.flatten(2).flatten(0, 1)  # [B·N, G·L]
                patch_gradient[rows].add_((weights @ group.flatten(0, 1)).unflatten(0, (-1, patches.shape[1])))
                gradient += (weights.T @ patches[rows].flatten(0, 1)).view_as(gradient)
        return patch_gradient.to(patches.dtype), word_gradient.to(words.dtype), None, None


def _blocks(patches: Tensor, words: Tensor, elements: int | None = None) -> Iterator[slice]:
    """Ranges of images whose similarities fit into a block.

    A power of two of them, which most batches are a multiple of: then no smaller last block has to be compiled for.
    """
    elements = BLOCK_ELEMENTS if elements is None else elements
    most = max(1, elements // max(1, patches.shape[1] * words.shape[0] * words.shape[1]))
    size = 1 << (most.bit_length() - 1)
    for start in range(0, len(patches), size):
        yield slice(start, start + size)


def _maxima(patches: Tensor, words: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both similarities [B, G] of a block, the best word [B, N, G] and the best patch [B, G, L]."""
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
    """The gradient of a block's similarities [B, N, G, L], zero but where a maximum was."""
    count, length = best_word.shape[1], best_patch.shape[2]
    token = torch.arange(length, device=share.device, dtype=best_word.dtype)
    patch = torch.arange(count, device=share.device, dtype=best_patch.dtype)
    by_word = torch.where(best_word.unsqueeze(3) == token, (to_text / count).to(dtype)[:, None, :, None], 0)
    by_patch = (to_image.unsqueeze(-1) * share).to(dtype)  # [B, G, L]
    return by_word + torch.where(best_patch.unsqueeze(1) == patch[:, None, None], by_patch.unsqueeze(1), 0)


def _index_type(size: int) -> torch.dtype:
    return torch.uint8 if size <= 256 else torch.int16


def _compiled_on_gpu(tensor: Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled where a GPU would otherwise read each block from memory several times."""
    return _compiled(function) if tensor.is_cuda else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return compile_shapes(function)
