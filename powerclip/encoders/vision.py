"""One walk through open_clip's vision transformer that yields the global and the dense features.

open_clip's own forward pass returns the patches without the final norm for some poolings and has no place for a
selector, so the walk is ours; the modules, and so the numbers, are open_clip's.

Axes: C pairs · N patches · n patches that stay · D the tower's own width
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from powerclip.encoders.selector import PatchContext, PatchSelector, RandomPatches, keep_patches
from powerclip.errors import UserError


def check_vision_tower(visual: Any) -> None:
    """Raise `UserError` when `visual` has no patches that live in the same space as its global embedding."""
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


def dropout_selector(visual: Any) -> PatchSelector | None:
    """The tower's configured patch dropout as a selector, so that it is known which patches stayed."""
    share = getattr(visual.patch_dropout, "prob", 0.0)
    return RandomPatches(keep=1 - share) if share else None


def walk_image(
    visual: Any, images: Tensor, selector: PatchSelector | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pooled [C, D] and patches [C, n, D], both after ln_post and before the projection, and the indices kept."""
    if tuple(images.shape[-2:]) != tuple(visual.image_size):
        found, expected = ("×".join(map(str, size)) for size in (images.shape[-2:], visual.image_size))
        raise UserError(f"images are {found} pixels, the model reads {expected}: set the data's image size to match")
    patches = visual.conv1(images).flatten(2).transpose(1, 2)
    position = visual.positional_embedding.to(patches.dtype)
    first = visual.class_embedding.to(patches.dtype).expand(patches.shape[0], 1, -1) + position[:1]
    patches = patches + position[1:]

    kept = None
    if selector is not None:
        kept = selector(PatchContext(images, patches))
        patches = keep_patches(patches, kept)

    x = visual.transformer(visual.ln_pre(torch.cat([first, patches], dim=1)))
    if visual.final_ln_after_pool:
        return visual.ln_post(_pool(visual, x)), visual.ln_post(x[:, 1:]), kept
    x = visual.ln_post(x)
    return _pool(visual, x), x[:, 1:], kept


def _pool(visual: Any, x: Tensor) -> Tensor:
    return x[:, 0] if visual.pool_type == "tok" else x[:, 1:].mean(dim=1)
