"""A forward pass through open_clip's vision transformer that gives the global and the dense features.

open_clip's own forward pass returns the patches without the final norm for some poolings and has no place for a
selector, so this one is ours; the modules, and so the numbers, are open_clip's.

Axes: C pairs · N patches · n patches that stay · D the tower's own width
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powerclip.encoders.positions import interpolate_positions
from powerclip.encoders.selector import PatchContext, PatchSelector, RandomPatches, Selection, keep_patches
from powerclip.encoders.self_attention import Packed
from powerclip.encoders.timm_tower import check_timm_tower, forward_timm, is_timm, timm_grid
from powerclip.errors import UserError


def check_vision_tower(visual: Any) -> None:
    """Raise `UserError` when `visual` has no patches that live in the same space as its global embedding.

    Also when its patches do not fill its images.
    """
    from open_clip.transformer import VisionTransformer

    if is_timm(visual):
        check_timm_tower(visual)
        return
    if not isinstance(visual, VisionTransformer):
        raise UserError(
            f"the image tower is a {type(visual).__name__}, which has no patch tokens: dense features need a vision "
            "transformer, such as ViT-B-16"
        )
    if getattr(visual, "attn_pool_contrastive", None) is not None:
        raise UserError("the image tower pools twice, as CoCa's: a patch has no embedding (leave out attentional_pool)")
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
    share = getattr(getattr(visual, "patch_dropout", None), "prob", 0.0)
    return RandomPatches(keep=1 - share) if share else None


def image_grid(visual: Any) -> tuple[int, int]:
    """Rows and columns of a tower's patches."""
    rows, columns = timm_grid(visual) if is_timm(visual) else visual.grid_size
    return rows, columns


def patch_size(visual: Any) -> tuple[int, int]:
    """Height and width of a patch, in pixels."""
    (height, width), (rows, columns) = visual.image_size, image_grid(visual)
    return height // rows, width // columns


def grid_of(visual: Any, images: Tensor) -> tuple[int, int]:
    """Rows and columns of patches of images [C, 3, H, W] of any size; UserError unless they are whole patches."""
    (height, width), (rows, columns) = images.shape[-2:], patch_size(visual)
    if height % rows or width % columns:
        raise UserError(f"images of {height}×{width} pixels are no whole number of patches of {rows}×{columns}")
    return height // rows, width // columns


def image_projection(visual: Any) -> Any:
    """What maps the tokens that `forward_image` gives to the joint space; None where they are in it already."""
    return getattr(visual, "proj", None)


def image_blocks(visual: Any) -> list[nn.Module]:
    """The tower's transformer blocks, the first one first."""
    return list(visual.trunk.blocks if is_timm(visual) else visual.transformer.resblocks)


def embed_image(visual: Any, images: Tensor, *, any_size: bool = False) -> tuple[Tensor, Tensor]:
    """The class token [C, 1, D] and the patches [C, N, D], embedded, with their positions, before ln_pre.

    Images of another size than the tower's are refused, or, with `any_size`, take positions between its own.
    """
    if is_timm(visual):
        raise UserError("methods that choose patches need open_clip's own ViT, and the image tower is timm's")
    if not any_size and tuple(images.shape[-2:]) != tuple(visual.image_size):
        actual, expected = ("×".join(map(str, size)) for size in (images.shape[-2:], visual.image_size))
        raise UserError(f"images are {actual} pixels, the model reads {expected}: set the data's image size to match")
    patches = (
        conv_as_linear(visual.conv1, images) if images.is_cuda else visual.conv1(images).flatten(2).transpose(1, 2)
    )
    position = visual.positional_embedding
    if any_size:
        rows, columns = grid_of(visual, images)
        position = interpolate_positions(position, image_grid(visual), (rows, columns))
    position = position.to(patches.dtype)
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
    visual: Any, images: Tensor, selector: PatchSelector | None = None, *, dense: bool = True, any_size: bool = False
) -> tuple[Tensor, Tensor, Selection | None]:
    """Pooled [C, D] and patches [C, n, D], both after ln_post and before the projection, and which patches stayed.

    Without `dense` there are no patches: n is 0. Towers of timm give both after their projection. `any_size` as in
    `embed_image`.
    """
    if is_timm(visual) and selector is None:
        return *forward_timm(visual, images, dense=dense, any_size=any_size), None
    first, patches = embed_image(visual, images, any_size=any_size)
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
    return *_pool_and_norm(visual, x, shown, dense=dense), selection


def tokens_after(visual: Any, images: Tensor, depth: int) -> Tensor:
    """The class token and the patches [C, 1+N, D] of images [C, 3, H, W] as the first `depth` blocks leave them."""
    return _run_blocks(visual, visual.ln_pre(torch.cat(embed_image(visual, images), dim=1)), 0, depth)


def forward_tokens(visual: Any, tokens: Tensor, depth: int, *, dense: bool = True) -> tuple[Tensor, Tensor]:
    """What `forward_image` gives, without a selector, for images whose `tokens_after` `depth` blocks are known."""
    return _pool_and_norm(visual, _run_blocks(visual, tokens, depth, None), None, dense=dense)


def _run_blocks(visual: Any, x: Tensor, first: int, end: int | None) -> Tensor:
    """Tokens [C, 1+N, D] through some of the blocks."""
    if not visual.transformer.batch_first:
        raise UserError("the image tower's blocks read tokens before images: they can only be run all at once")
    for block in image_blocks(visual)[first:end]:
        x = block(x)
    return x


def _pool_and_norm(visual: Any, x: Tensor, shown: Tensor | None, *, dense: bool) -> tuple[Tensor, Tensor]:
    """Pooled [C, D] and patches [C, n, D] of tokens [C, 1+n, D] after the last block."""
    if visual.attn_pool is not None:
        return _pool_by_attention(visual, x, shown, dense=dense)
    if not dense:
        # The norm is each token's own, so that the class token alone can have it.
        after = visual.final_ln_after_pool or visual.pool_type == "tok"
        pooled = visual.ln_post(pool(visual, x, shown)) if after else pool(visual, visual.ln_post(x), shown)
        return pooled, x[:, :0]
    if visual.final_ln_after_pool:
        return visual.ln_post(pool(visual, x, shown)), visual.ln_post(x[:, 1:])
    x = visual.ln_post(x)
    return pool(visual, x, shown), x[:, 1:]


def _pool_by_attention(visual: Any, x: Tensor, shown: Tensor | None, *, dense: bool) -> tuple[Tensor, Tensor]:
    """Pooled [C, D] and patches [C, n, D] of tokens [C, 1+n, W] where learned queries pool them.

    A query that sees one patch takes its value, whatever it asks: that is the patch's own embedding.
    """
    if shown is not None:
        raise UserError("a method that hides patches cannot be used with an image tower that pools by attention")
    pooler = visual.attn_pool
    pooled = pool(visual, visual.ln_post(pooler(x)))
    if not dense:
        return pooled, pooled.new_zeros(len(x), 0, pooled.shape[-1])
    attention = pooler.attn
    whole = attention.in_proj_weight
    weight = attention.v_proj_weight if whole is None else whole.chunk(3)[2]
    bias = None if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)[2]
    return pooled, visual.ln_post(attention.out_proj(F.linear(pooler.ln_k(x[:, 1:]), weight, bias)))


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
