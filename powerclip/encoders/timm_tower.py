"""timm's vision transformers as image towers, through open_clip's `TimmModel`: SigLIP, EVA, PE, ViTamin and others.

timm gives tokens after its final norm; pooling, norm, head and projection follow. A patch's embedding is what they give
for that patch alone:

    class token or mean   the patch itself takes the place of the pooled token
    attention ("map")     a query that sees one patch takes its value, whatever it asks; the head's MLP follows

Axes: C images · N patches · D width of the joint space
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from powerclip.errors import UserError

# timm's modules whose models give tokens on a grid. Convolutional ones and Swin give maps of features, without tokens.
FAMILIES = ("vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "vitamin", "eva")


def is_timm(visual: Any) -> bool:
    """Whether an image tower is open_clip's wrapper around a model of timm."""
    return hasattr(visual, "trunk")


def timm_obstacle(vision: dict[str, Any]) -> str | None:
    """Why a tower of timm cannot be used, from its config alone; None when it can."""
    from timm.models import get_pretrained_cfg, is_model, is_model_in_modules

    name = vision["timm_model_name"]
    if not is_model(name):
        return f"the image tower is timm's {name}, which the installed timm does not have"
    if not is_model_in_modules(name, FAMILIES):
        return f"the image tower is timm's {name}, which has no patch tokens"
    if vision.get("patch_dropout"):
        return f"vision_cfg.patch_dropout: timm's {name} does not say which patches it kept"
    known = get_pretrained_cfg(name)
    size = vision.get("image_size", 224)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if known is not None and known.fixed_input_size and known.input_size[1:] != sides:
        return f"vision_cfg.image_size is {size}, and timm's {name} reads {known.input_size[1]}"
    return None


def check_timm_tower(visual: Any) -> None:
    """Raise `UserError` when the tower's patches have no place in the space of its global embedding."""
    trunk = visual.trunk
    grid = getattr(getattr(trunk, "patch_embed", None), "grid_size", None)
    if grid is None or not hasattr(trunk, "num_prefix_tokens"):
        raise UserError(f"the image tower is timm's {type(trunk).__name__}, which has no patch tokens")
    size = trunk.patch_embed.img_size
    if size is not None and tuple(size) != tuple(visual.image_size):
        expected, actual = ("×".join(map(str, sides)) for sides in (size, visual.image_size))
        raise UserError(f"vision_cfg.image_size is {actual}, but timm's tower reads {expected}: give that size")
    pool = getattr(trunk, "attn_pool", None)
    if pool is not None and (getattr(pool, "pos_embed", None) is not None or pool.latent_len != 1):
        raise UserError(
            "the image tower pools by attention with positions or several queries: a patch has no embedding"
        )


def timm_grid(visual: Any) -> tuple[int, int]:
    """Rows and columns of patches."""
    rows, columns = visual.trunk.patch_embed.grid_size
    return rows, columns


def forward_timm(visual: Any, images: Tensor, *, dense: bool = True, any_size: bool = False) -> tuple[Tensor, Tensor]:
    """The global embedding [C, D] and the patches [C, N, D], both in the joint space. Without `dense`, no patches.

    Images of another size than the tower's are refused, or, with `any_size`, take positions between its own.
    """
    trunk = visual.trunk
    if not any_size and tuple(images.shape[-2:]) != tuple(visual.image_size):
        actual, expected = ("×".join(map(str, size)) for size in (images.shape[-2:], visual.image_size))
        raise UserError(f"images are {actual} pixels, the model reads {expected}: set the data's image size to match")
    with _reading_any_size(trunk) if any_size else nullcontext():
        tokens = trunk.forward_features(images)
    embedding = visual.head(trunk.forward_head(tokens))
    if not dense:
        return embedding, embedding.new_zeros(len(images), 0, embedding.shape[-1])
    return embedding, _pooled_alone(visual, tokens[:, trunk.num_prefix_tokens :])


@contextmanager
def _reading_any_size(trunk: Any) -> Iterator[None]:
    """Let a trunk interpolate its positions (timm's `dynamic_img_size`), which it is normally built for or not."""
    from timm.layers.format import Format
    from timm.layers.patch_embed import PatchEmbed
    from timm.models.vision_transformer import VisionTransformer

    embed = trunk.patch_embed
    if not isinstance(trunk, VisionTransformer) or type(embed) is not PatchEmbed or trunk.pos_embed is None:
        raise UserError(
            f"the image tower is timm's {type(trunk).__name__}, which reads images of its own size only: detection "
            "needs open_clip's own ViT, or timm's with learned positions"
        )
    changed: list[tuple[Any, dict[str, Any]]] = [
        (trunk, {"dynamic_img_size": True}),
        (embed, {"strict_img_size": False, "flatten": False, "output_fmt": Format.NHWC}),
    ]
    before = [(module, {name: getattr(module, name) for name in values}) for module, values in changed]
    try:
        for module, values in changed:
            vars(module).update(values)
        yield
    finally:
        for module, values in before:
            vars(module).update(values)


def _pooled_alone(visual: Any, patches: Tensor) -> Tensor:
    """What the tower's head gives for each patch, as if the image had no other."""
    trunk = visual.trunk
    pool = getattr(trunk, "attn_pool", None)
    if pool is not None:
        # The softmax over one key is 1: only the second half of `kv`, the value, counts.
        width = pool.kv.weight.shape[0] // 2
        bias = None if pool.kv.bias is None else pool.kv.bias[width:]
        patches = pool.proj_drop(pool.proj(F.linear(patches, pool.kv.weight[width:], bias)))
        if pool.mlp is not None:
            patches = patches + pool.mlp(pool.norm(patches))
    return visual.head(trunk.head(trunk.head_drop(trunk.fc_norm(patches))))
