"""From an open_clip name or config to a dual encoder: the registry of models, checked configs, built towers."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import open_clip
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from torch import nn

from powerclip.encoders.dual import DualEncoder
from powerclip.encoders.timm_tower import timm_obstacle
from powerclip.encoders.weights import download, load_weights
from powerclip.errors import UserError, first_line, nearest

# What towers with the same weights may differ in: the weights decide it, or the model that they come from does.
_DECIDED_BY_WEIGHTS = frozenset({"custom_text", "quick_gelu", "init_logit_scale", "init_logit_bias"})


@dataclass(frozen=True)
class Blueprint:
    """Everything a model is made from, wherever it came from."""

    config: dict[str, Any]  # open_clip's model_cfg
    source: str  # what the messages call it: a name, or the path of a config file
    preprocess: dict[str, Any] = field(default_factory=dict)  # open_clip's preprocess_cfg, where it is not the default
    fill: Callable[[nn.Module], None] | None = None  # fetches the weights into open_clip's model; None: random ones
    directory: Path | None = None  # where a Hugging Face tokenizer may lie beside the model


def named(name: str, pretrained: str | None = None) -> Blueprint:
    """Look up an open_clip model name, and its weights where some are asked for; they are fetched later."""
    name, tag = _split(name)
    if tag is not None and pretrained is not None and tag != pretrained:
        raise UserError(f"model {name!r}: two kinds of pretrained weights, {tag!r} and {pretrained!r}: give one")
    pretrained = pretrained or tag
    config = open_clip.get_model_config(name)
    check_config(config, name)
    if pretrained is None:
        return Blueprint(config, name)

    tags = tags_of(name)
    known = open_clip.get_pretrained_cfg(name, pretrained) if tags else {}
    if not known:
        if not Path(pretrained).is_file():
            raise UserError(
                f"model {name!r} has no pretrained weights {pretrained!r}{nearest(pretrained, tags)}, and there is no "
                f"such file; known: {', '.join(tags) or 'none'}"
            )
        return Blueprint(config, name, fill=partial(load_weights, path=Path(pretrained), source=name, convert=True))
    if known.get("quick_gelu"):
        # Weights trained with QuickGELU give wrong features under GELU; open_clip would only warn.
        config["quick_gelu"] = True

    def fill(clip: nn.Module) -> None:
        load_weights(clip, download(known, f"{name} ({pretrained})"), name, convert=True)

    return Blueprint(config, name, known, fill)


def assemble(blueprint: Blueprint) -> DualEncoder:
    """Construct the towers and fill them with the weights, if there are any."""
    config, source = blueprint.config, blueprint.source
    check_config(config, source)
    encoder = config["text_cfg"].get("hf_model_name") or ""
    if os.path.isabs(encoder) and not os.path.isdir(encoder):
        raise UserError(f"{source}: its text tower's config and tokenizer are to be in {encoder}, which is not there")
    arguments = copy.deepcopy(config)
    custom = arguments.pop("custom_text", False) or bool(arguments["text_cfg"].get("hf_model_name"))
    kind = open_clip.CustomTextCLIP if custom else open_clip.CLIP
    if blueprint.fill is not None:
        # Weights for the whole model follow: none need be fetched for its parts.
        arguments["vision_cfg"] |= (
            {"timm_model_pretrained": False} if config["vision_cfg"].get("timm_model_name") else {}
        )
        arguments["text_cfg"] |= {"hf_model_pretrained": False} if config["text_cfg"].get("hf_model_name") else {}
    try:
        clip = kind(**arguments)
    # OSError: a part's weights or config could not be fetched; KeyError: a kind of text encoder that open_clip lacks.
    except (AssertionError, TypeError, ValueError, RuntimeError, ZeroDivisionError, OSError, KeyError) as error:
        raise UserError(f"{source}: these towers cannot be built: {first_line(error)}") from error
    preprocess = merge_preprocess_dict(PreprocessCfg(), blueprint.preprocess)
    _check_preprocess(preprocess, source)
    open_clip.set_model_preprocess_cfg(clip, preprocess | {"size": clip.visual.image_size})
    try:
        model = DualEncoder(clip, config)
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    model.directory = blueprint.directory
    if blueprint.fill is not None:
        blueprint.fill(clip)
    return model


def tags_of(name: str) -> list[str]:
    """The tags of an open_clip model's published weights; releases differ in what they answer where there are none."""
    try:
        return list(open_clip.list_pretrained_tags_by_model(name))
    except KeyError:
        return []


def supported_models() -> list[str]:
    """Names of the open_clip models that can be used: both towers have tokens."""
    return [name for name in open_clip.list_models() if obstacle(open_clip.get_model_config(name)) is None]


def spelled_out(config: dict[str, Any]) -> dict[str, Any]:
    """What decides a config's towers, apart from what their weights decide, flat and with every default written out."""
    flat: dict[str, Any] = {}
    for part, kind in (("vision_cfg", open_clip.CLIPVisionCfg), ("text_cfg", open_clip.CLIPTextCfg)):
        known = {item.name for item in dataclasses.fields(kind)}
        values = dataclasses.asdict(kind(**{key: value for key, value in config[part].items() if key in known}))
        flat |= {f"{part}.{key}": _plain(value) for key, value in values.items()}
    tops = {key: value for key, value in config.items() if key not in ("vision_cfg", "text_cfg")}
    return flat | {key: _plain(value) for key, value in tops.items() if key not in _DECIDED_BY_WEIGHTS}


def _plain(value: Any) -> Any:
    """Sizes are written as one number or as a pair, in lists or tuples; a local text encoder counts by its config."""
    if isinstance(value, list | tuple):
        return value[0] if len(set(value)) == 1 else list(value)
    if isinstance(value, str) and (Path(value) / "config.json").is_file():
        return (Path(value) / "config.json").read_text(encoding="utf-8")
    return value


def check_config(config: object, source: str) -> None:
    """Raise `UserError` when `config` is not an open_clip model config whose towers have tokens.

    Looks before anything is built: a timm or Hugging Face tower would start a download.
    """
    if not isinstance(config, dict):
        raise UserError(f"{source}: a model config is a mapping, not {type(config).__name__}")
    for part in ("embed_dim", "vision_cfg", "text_cfg"):
        if part not in config:
            raise UserError(f"{source}: a model config needs {part!r}")
    for part in ("vision_cfg", "text_cfg"):
        if not isinstance(config[part], dict):
            raise UserError(f"{source}: {part} is a mapping, not {type(config[part]).__name__}")
    reason = obstacle(config)
    if reason is not None:
        raise UserError(f"{source}: {reason}: choose a model with a vision transformer, such as ViT-B-16")

    top = [*inspect.signature(open_clip.CLIP).parameters, "custom_text"]
    _check_keys(config, [key for key in top if key not in ("cast_dtype", "output_dict")], source, "")
    for part, kind in (("vision_cfg", open_clip.CLIPVisionCfg), ("text_cfg", open_clip.CLIPTextCfg)):
        _check_keys(config[part], [item.name for item in dataclasses.fields(kind)], source, f"{part}.")
    _check_heads(config, source)


def _check_preprocess(preprocess: dict[str, Any], source: str) -> None:
    """Raise `UserError` for what open_clip's transform would meet with an assertion, or each image with an error."""
    for part in ("mean", "std"):
        values = preprocess[part]
        numbers = isinstance(values, list | tuple) and all(isinstance(value, int | float) for value in values)
        if not numbers or len(values) != 3 or (part == "std" and min(values) <= 0):
            raise UserError(f"{source}: preprocess_cfg.{part} must be three numbers{' above 0' * (part == 'std')}")
    choices = {"interpolation": ("bicubic", "bilinear", "random"), "resize_mode": ("shortest", "longest", "squash")}
    for part, known in choices.items():
        if preprocess[part] not in known:
            raise UserError(
                f"{source}: preprocess_cfg.{part} must be one of {', '.join(known)}, not {preprocess[part]!r}"
            )


def _check_keys(given: dict[str, Any], known: list[str], source: str, where: str) -> None:
    for key in given:
        if key not in known:
            raise UserError(f"{source}: unknown setting {where}{key}{nearest(str(key), known)}")


def _check_heads(config: dict[str, Any], source: str) -> None:
    vision = open_clip.CLIPVisionCfg(**config["vision_cfg"])
    text = open_clip.CLIPTextCfg(**config["text_cfg"])
    own = [] if vision.timm_model_name else [("vision_cfg.width", vision.width, vision.head_width)]
    own += [] if text.hf_model_name else [("text_cfg.width", text.width, text.heads)]
    for what, width, divisor in own:
        if not isinstance(width, int) or not isinstance(divisor, int) or width < 1 or divisor < 1 or width % divisor:
            other = "vision_cfg.head_width" if what.startswith("vision") else "text_cfg.heads"
            raise UserError(f"{source}: {what} ({width}) must be a multiple of {other} ({divisor})")


def obstacle(config: dict[str, Any]) -> str | None:
    """Why a model of this config cannot be used, without building it; None when nothing speaks against it."""
    if "vision_cfg" not in config or "text_cfg" not in config:
        return "it has no image tower or no text tower"  # newer releases have models of sound too
    if "multimodal_cfg" in config:
        return "it is a CoCa with a caption decoder"
    if config["vision_cfg"].get("timm_model_name"):
        return timm_obstacle(config["vision_cfg"])
    if isinstance(config["vision_cfg"].get("layers"), list | tuple):
        return "the image tower is a ResNet, which has no patch tokens"
    return None


def _split(name: str) -> tuple[str, str | None]:
    """`ViT-B-16/tag` → name and tag; `ViT-B/16`, as the papers write it, is a name."""
    names = open_clip.list_models()
    full = name.replace("/", "-")
    if full in names:
        return full, None
    head, _, tag = name.rpartition("/")
    if head.replace("/", "-") in names:
        return head.replace("/", "-"), tag
    raise UserError(
        f"there is no model {name!r}{nearest(full, supported_models())}: looked for a folder or a checkpoint of that "
        "name, and among open_clip's models, such as ViT-B-16"
    )
