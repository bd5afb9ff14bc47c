"""A forward pass through open_clip's vision transformer that gives the global and the dense features.

open_clip's own forward pass returns the patches without the final norm for some poolings and has no place for a
selector, so this one is ours; the modules, and so the numbers, are open_clip's.

Axes: C pairs · N patches · n patches that stay · D the tower's own width
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.encoders.selector import PatchContext, PatchSelector, RandomPatches, Selection, keep_patches
from powerclip.encoders.self_attention import Packed
from powerclip.errors import UserError


def check_vision_tower(visual: Any) -> None:
    """Raise `UserError` when `visual` has no patches that live in the same space as its global embedding.

    Also when its patches do not fill its images.
    """
    from open_clip.transformer import VisionTransformer

    if not isinstance(visual, VisionTransformer):
        raise UserError(
            f"the image tower is a {type(visual).__name__}: dense features need open_clip's own VisionTransformer "
            "(a ViT-* model)"
        )
    if visual.attn_pool is not None:
        raise UserError(
            "the image tower pools by attention: its patches are not in the space of its global embedding "
            "(choose a model without attentional_pool)"
        )
    if visual.pool_type not in ("tok", "avg"):
        raise UserError(
            f"the image tower has pool_type {visual.pool_type!r} and so no global embedding (choose 'tok' or 'avg')"
        )
    # Pixels beyond the last whole patch would belong to none, and regions and heatmaps spread the grid over all pixels.
    if any(size % patch for size, patch in zip(visual.image_size, visual.patch_size, strict=True)):
        size, patch = ("×".join(map(str, sides)) for sides in (visual.image_size, visual.patch_size))
        raise UserError(f"vision_cfg.image_size ({size}) must be a multiple of vision_cfg.patch_size ({patch})")


def dropout_selector(visual: Any) -> RandomPatches | None:
    """The tower's configured patch dropout as a selector, so that it is known which patches stayed."""
    share = getattr(visual.patch_dropout, "prob", 0.0)
    return RandomPatches(keep=1 - share) if share else None


def embed_image(visual: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """The class token [C, 1, D] and the patches [C, N, D], embedded, with their positions, before ln_pre."""
    if tuple(images.shape[-2:]) != tuple(visual.image_size):
        actual, expected = ("×".join(map(str, size)) for size in (images.shape[-2:], visual.image_size))
        raise UserError(f"images are {actual} pixels, the model reads {expected}: set the data's image size to match")
    patches = (
        conv_as_linear(visual.conv1, images) if images.is_cuda else visual.conv1(images).flatten(2).transpose(1, 2)
    )
    position = visual.positional_embedding.to(patches.dtype)
    first = visual.class_embedding.to(patches.dtype).expand(patches.shape[0], 1, -1) + position[:1]
    return first, patches + position[1:]


def conv_as_linear(convolution: Any, images: Tensor) -> Tensor:
    """The patch embedding's convolution as the matrix product that it is [C, N, D].

    cuDNN has no fast kernel for a stride as long as the window: on an H200 it took 7 of 167 ms of a ViT-B/16's step.
    """
    count, channels, height, width = images.shape
    rows, columns = convolution.kernel_size
    pixels = images.reshape(count, channels, height // rows, rows, width // columns, columns)
    pixels = pixels.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return F.linear(pixels, convolution.weight.flatten(1), convolution.bias)


def forward_image(
    visual: Any, images: Tensor, selector: PatchSelector | None = None, *, dense: bool = True
) -> tuple[Tensor, Tensor, Selection | None]:
    """Pooled [C, D] and patches [C, n, D], both after ln_post and before the projection, and which patches stayed.

    Without `dense` there are no patches: n is 0.
    """
    first, patches = embed_image(visual, images)
    selection, shown, mask = None, None, None
    if selector is not None:
        selected = selector(PatchContext(images, patches))
        selection = selected if isinstance(selected, Selection) else Selection(selected)
        by_length = selection.shown is not None and _takes_lengths(visual, selection.kept.shape[1])
        selection = shown_first(selection) if by_length else selection
        shown = selection.shown
        patches = keep_patches(patches, selection.kept)

    x = visual.ln_pre(torch.cat([first, patches], dim=1))
    if shown is not None and by_length:
        mask = (1 + shown.sum(1)).to(x.dtype)
    elif shown is not None:
        mask = _hiding_mask(shown, visual.transformer.resblocks[0].attn.num_heads, x.dtype)
    x = visual.transformer(x, attn_mask=mask)
    if not dense:
        # The norm is each token's own, so that the class token alone can have it.
        after = visual.final_ln_after_pool or visual.pool_type == "tok"
        pooled = visual.ln_post(pool(visual, x, shown)) if after else pool(visual, visual.ln_post(x), shown)
        return pooled, x[:, :0], selection
    if visual.final_ln_after_pool:
        return visual.ln_post(pool(visual, x, shown)), visual.ln_post(x[:, 1:]), selection
    x = visual.ln_post(x)
    return pool(visual, x, shown), x[:, 1:], selection


def pool(visual: Any, x: Tensor, shown: Tensor | None = None) -> Tensor:
    """The global token [C, D] of tokens [C, 1+n, D]: the class token, or the mean of the patches that are shown."""
    if visual.pool_type == "tok":
        return x[:, 0]
    if shown is None:
        return x[:, 1:].mean(dim=1)
    return torch.where(shown.unsqueeze(-1), x[:, 1:], 0).sum(dim=1) / shown.sum(dim=1, keepdim=True)


def shown_first(selection: Selection) -> Selection:
    """The same patches, those that are shown before the others: no longer ascending where some are hidden."""
    assert selection.shown is not None
    order = selection.shown.int().argsort(dim=1, descending=True, stable=True)
    return Selection(selection.kept.gather(1, order), selection.shown.gather(1, order))


def _takes_lengths(visual: Any, patches: int) -> bool:
    """Whether the tower's attention can take a number of tokens for each image instead of a mask.

    The number travels as bf16, which counts up to 256.
    """
    blocks = visual.transformer.resblocks
    return patches < 256 and all(isinstance(getattr(block, "attn", None), Packed) for block in blocks)


def _hiding_mask(shown: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """What attention adds to its logits [C·heads, 1+n, 1+n], image by image: −inf for the keys that are hidden."""
    hidden = F.pad(~shown, (1, 0), value=False)
    added = torch.zeros(hidden.shape, dtype=dtype, device=shown.device).masked_fill(hidden, float("-inf"))
    # Every query and every head of an image has the same row: the queries share memory, only the heads are written out.
    rows = added.repeat_interleave(heads, dim=0).unsqueeze(1)
    return rows.expand(-1, rows.shape[-1], -1)
