"""What there is to load: every model that open_clip lists, what its towers are, and why some cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import open_clip

from powerclip.encoders.hf_text import DEFAULT_CONTEXT_LENGTH
from powerclip.encoders.models import obstacle, tags_of
from powerclip.errors import UserError, nearest


@dataclass(frozen=True)
class Entry:
    """One model of open_clip."""

    name: str
    image: str  # its image tower, in a few words
    text: str  # its text tower
    pooling: str  # how the image tower's tokens become one
    context: int  # most tokens of a caption
    tags: tuple[str, ...]  # published weights
    obstacle: str | None  # why it cannot be used; None when it can


def catalogue(pattern: str | None = None) -> list[Entry]:
    """The models whose names hold `pattern`, or match it where it has `*` or `?`; all without one. Builds none of them.

    Raises:
        UserError: no name matches.
    """
    names = open_clip.list_models()
    if pattern is None:
        return [_entry(name) for name in names]
    wild = pattern.lower() if any(mark in pattern for mark in "*?") else f"*{pattern.lower()}*"
    matching = [name for name in names if fnmatch(name.lower(), wild)]
    if not matching:
        raise UserError(f"no model of open_clip matches {pattern!r}{nearest(pattern, names)}")
    return [_entry(name) for name in matching]


def _entry(name: str) -> Entry:
    config = open_clip.get_model_config(name)
    vision, text = config.get("vision_cfg") or {}, config.get("text_cfg") or {}
    return Entry(
        name,
        image=_image(vision),
        text=_text(text),
        pooling=_pooling(vision),
        context=text.get("context_length", DEFAULT_CONTEXT_LENGTH),
        tags=tuple(tags_of(name)),
        obstacle=obstacle(config),
    )


def _image(vision: dict[str, Any]) -> str:
    size = vision.get("image_size", open_clip.CLIPVisionCfg.image_size)
    size = f"{size[0]}×{size[1]}" if isinstance(size, list | tuple) else size
    if vision.get("timm_model_name"):
        return f"timm {vision['timm_model_name']}, {size}"
    if isinstance(vision.get("layers"), list | tuple):
        return f"ResNet, {size}"
    return f"ViT/{vision.get('patch_size', open_clip.CLIPVisionCfg.patch_size)}, {size}" if vision else "none"


def _text(text: dict[str, Any]) -> str:
    if text.get("hf_model_name"):
        return f"Hugging Face {text['hf_model_name']}"
    tokenizer = text.get("hf_tokenizer_name")
    return f"transformer, tokenizer {tokenizer}" if tokenizer else "transformer"


def _pooling(vision: dict[str, Any]) -> str:
    if not vision or isinstance(vision.get("layers"), list | tuple) or vision.get("attentional_pool"):
        return "attention" if vision else "–"
    if not vision.get("timm_model_name"):
        return {"tok": "class token", "avg": "mean"}.get(vision.get("pool_type", "tok"), vision.get("pool_type", ""))
    names = {"token": "class token", "avg": "mean", "map": "attention", "": "timm's own"}
    return names.get(vision.get("timm_pool", "avg"), str(vision.get("timm_pool")))
