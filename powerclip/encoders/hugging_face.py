"""Hugging Face's `CLIPModel` and open_clip's `CLIP`, one into the other: configs, weights, preprocessing.

Both describe the same two towers under other names. One table of names serves both directions; values are only renamed,
transposed or put end to end, so that a round trip keeps every bit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors.torch
import torch
from open_clip import SimpleTokenizer
from torch import Tensor, nn

from powerclip.encoders.dual import DualEncoder
from powerclip.encoders.models import Blueprint, spelled_out
from powerclip.encoders.weights import fit_weights
from powerclip.errors import UserError, first_line

CONFIG_FILE = "config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILE = "model.safetensors.index.json"  # names the parts of weights that lie in several files
PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"  # newer releases keep the image processor in here
SMALL_FILES = (  # what may lie beside the config and the weights
    *(INDEX_FILE, PREPROCESSOR_FILE, PROCESSOR_FILE),
    *("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"),
)

log = logging.getLogger(__name__)


class ClipModel(NamedTuple):
    """What a `CLIPModel` folder holds, apart from its tokenizer."""

    config: dict[str, Any]  # config.json
    state: dict[str, Tensor]  # model.safetensors
    preprocessor: dict[str, Any]  # preprocessor_config.json


# ---- weights ---------------------------------------------------------------------------------------------------------

Kind = Literal["same", "transposed", "packed"]  # packed: open_clip keeps queries, keys and values end to end

_TOP: list[tuple[str, str, Kind]] = [
    ("logit_scale", "logit_scale", "same"),
    ("visual.proj", "visual_projection.weight", "transposed"),
    ("text_projection", "text_projection.weight", "transposed"),
    ("visual.class_embedding", "vision_model.embeddings.class_embedding", "same"),
    ("visual.conv1.weight", "vision_model.embeddings.patch_embedding.weight", "same"),
    ("visual.positional_embedding", "vision_model.embeddings.position_embedding.weight", "same"),
    ("visual.ln_pre.weight", "vision_model.pre_layrnorm.weight", "same"),
    ("visual.ln_pre.bias", "vision_model.pre_layrnorm.bias", "same"),
    ("visual.ln_post.weight", "vision_model.post_layernorm.weight", "same"),
    ("visual.ln_post.bias", "vision_model.post_layernorm.bias", "same"),
    ("token_embedding.weight", "text_model.embeddings.token_embedding.weight", "same"),
    ("positional_embedding", "text_model.embeddings.position_embedding.weight", "same"),
    ("ln_final.weight", "text_model.final_layer_norm.weight", "same"),
    ("ln_final.bias", "text_model.final_layer_norm.bias", "same"),
]

# Of each block, for its weight and for its bias; `*` stands for q, k and v.
_BLOCK: list[tuple[str, str, Kind]] = [
    ("ln_1.", "layer_norm1.", "same"),
    ("attn.in_proj_", "self_attn.*_proj.", "packed"),
    ("attn.out_proj.", "self_attn.out_proj.", "same"),
    ("ln_2.", "layer_norm2.", "same"),
    ("mlp.c_fc.", "mlp.fc1.", "same"),
    ("mlp.c_proj.", "mlp.fc2.", "same"),
]


def weight_names(vision_layers: int, text_layers: int) -> Iterator[tuple[str, str, Kind]]:
    """open_clip's and Hugging Face's name of every weight, and how one becomes the other."""
    yield from _TOP
    for ours, theirs, layers in (("visual.", "vision_model", vision_layers), ("", "text_model", text_layers)):
        for layer in range(layers):
            for part, other, kind in _BLOCK:
                for end in ("weight", "bias"):
                    block = f"{ours}transformer.resblocks.{layer}.{part}{end}"
                    yield block, f"{theirs}.encoder.layers.{layer}.{other}{end}", kind


def to_open_clip(state: Mapping[str, Tensor], vision_layers: int, text_layers: int) -> dict[str, Tensor]:
    """The state dict of open_clip's `CLIP` from that of a `CLIPModel`; UserError when a weight is missing."""
    converted = {}
    for ours, theirs, kind in weight_names(vision_layers, text_layers):
        names = [theirs.replace("*", part) for part in "qkv"] if kind == "packed" else [theirs]
        for name in names:
            if name not in state:
                raise UserError(f"not the weights of this CLIPModel: {name} is missing")
        parts = [state[name] for name in names]
        value = torch.cat(parts) if kind == "packed" else parts[0]
        converted[ours] = value.T.contiguous() if kind == "transposed" else value
    return converted


def to_hugging_face(state: Mapping[str, Tensor], vision_layers: int, text_layers: int) -> dict[str, Tensor]:
    """The state dict of a `CLIPModel` from that of open_clip's `CLIP`."""
    converted = {}
    for ours, theirs, kind in weight_names(vision_layers, text_layers):
        value = state[ours].detach()
        if kind == "packed":
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                converted[theirs.replace("*", part)] = piece.clone()
        else:
            converted[theirs] = (value.T if kind == "transposed" else value).contiguous()
    return converted


# ---- configs ---------------------------------------------------------------------------------------------------------

# What Hugging Face leaves out of a config file because it is its default.
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}
_EPS = 1e-5  # of both libraries' layer norms, unless they say otherwise
_LARGEST_ID = 2  # an eos_token_id of 2 means: the largest id of a caption (a mistake of early configs that stayed)

# open_clip's settings that a CLIPModel can hold in some way; all others must have their default.
_EXPRESSIBLE = {
    *("embed_dim", "nonscalar_logit_scale"),
    *(f"vision_cfg.{key}" for key in ("layers", "width", "head_width", "mlp_ratio", "patch_size", "image_size")),
    *(f"vision_cfg.{key}" for key in ("patch_dropout", "pos_embed_type", "final_ln_after_pool", "output_tokens")),
    *(f"text_cfg.{key}" for key in ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio")),
    *(f"text_cfg.{key}" for key in ("pad_id", "eos_id", "output_tokens", "final_ln_after_pool")),
    *(f"text_cfg.{key}" for key in ("hf_tokenizer_name", "tokenizer_mode", "tokenizer_kwargs")),
    *(f"{part}.{key}" for part in ("vision_cfg", "text_cfg") for key in ("act_kwargs", "norm_kwargs")),
}


def from_clip_model(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """open_clip's model config and state dict of a `CLIPModel`; UserError when open_clip cannot express it."""
    model = to_model_config(config)
    return model, to_open_clip(state, model["vision_cfg"]["layers"], model["text_cfg"]["layers"])


def to_model_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """open_clip's model config of a `CLIPModel`'s config."""
    if config.get("model_type") != "clip":
        raise UserError(f"model_type is {config.get('model_type')!r}: of Hugging Face's models only 'clip' is read")
    vision = {**_VISION_DEFAULTS, **(config.get("vision_config") or {})}
    text = {**_TEXT_DEFAULTS, **(config.get("text_config") or {})}
    acts = {vision["hidden_act"], text["hidden_act"]}
    if "quick_gelu" in acts and len(acts) > 1:
        raise UserError(
            f"open_clip's towers share one activation, these have {vision['hidden_act']} and {text['hidden_act']}"
        )
    if vision["num_channels"] != 3:
        raise UserError(f"vision_config.num_channels is {vision['num_channels']}, images have 3")
    model: dict[str, Any] = {
        "embed_dim": config.get("projection_dim") or 512,
        "quick_gelu": acts == {"quick_gelu"},
        "vision_cfg": {
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
            "head_width": vision["hidden_size"] // vision["num_attention_heads"],
            **_tower(vision, "vision_config"),
        },
        "text_cfg": {
            "context_length": text["max_position_embeddings"],
            "vocab_size": text["vocab_size"],
            "heads": text["num_attention_heads"],
            **_tower(text, "text_config"),
        },
    }
    # The largest id of a caption is its end where the end has the last id of the vocabulary, as in CLIP's own.
    if text["eos_token_id"] not in (_LARGEST_ID, text["vocab_size"] - 1):
        model["text_cfg"] |= {"pool_type": "eos", "eos_id": text["eos_token_id"]}
    return model


def _tower(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What both towers have, in open_clip's words."""
    width, act = config["hidden_size"], config["hidden_act"]
    ratio = config["intermediate_size"] / width
    if int(width * ratio) != config["intermediate_size"]:
        raise UserError(f"{where}.intermediate_size {config['intermediate_size']} is no multiple of {width} in floats")
    if act not in ("quick_gelu", "gelu", "gelu_pytorch_tanh"):
        raise UserError(f"{where}.hidden_act is {act!r}: open_clip has gelu, quick_gelu and gelu_pytorch_tanh")
    tower: dict[str, Any] = {"width": width, "layers": config["num_hidden_layers"], "mlp_ratio": ratio}
    if act == "gelu_pytorch_tanh":
        tower["act_kwargs"] = {"approximate": "tanh"}
    if config["layer_norm_eps"] != _EPS:
        tower["norm_kwargs"] = {"eps": config["layer_norm_eps"]}
    return tower


def to_clip_model(model: DualEncoder) -> ClipModel:
    """The model as a `CLIPModel`: config, weights and image preprocessing.

    Raises:
        UserError: the reason why a `CLIPModel` cannot hold it.
    """
    config = spelled_out(model.config)
    _check_expressible(model, config)
    vision_width, text_width = config["vision_cfg.width"], config["text_cfg.width"]
    vocabulary = config["text_cfg.vocab_size"]
    end = config["text_cfg.eos_id"] if config["text_cfg.pool_type"] == "eos" else vocabulary - 1
    layers = config["vision_cfg.layers"], config["text_cfg.layers"]
    quick = bool(model.config.get("quick_gelu"))
    state = {name.removeprefix("text."): value for name, value in model.clip.state_dict().items()}
    state["logit_scale"] = state["logit_scale"].reshape(())
    of_model = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": model.embed_dim,
        "logit_scale_init_value": float(state["logit_scale"]),
        "vision_config": {
            "model_type": "clip_vision_model",
            "image_size": model.image_size[0],
            "patch_size": model.image_size[0] // model.grid[0],
            "num_channels": 3,
            "num_attention_heads": vision_width // config["vision_cfg.head_width"],
            "projection_dim": model.embed_dim,
            **_hugging_face_tower(config, "vision_cfg", quick=quick),
        },
        "text_config": {
            "model_type": "clip_text_model",
            "vocab_size": vocabulary,
            "max_position_embeddings": config["text_cfg.context_length"],
            "num_attention_heads": config["text_cfg.heads"],
            "projection_dim": model.embed_dim,
            "bos_token_id": end - 1,
            "eos_token_id": end,
            "pad_token_id": end,  # CLIP's tokenizer pads with the end of text; a causal tower does not see it
            **_hugging_face_tower(config, "text_cfg", quick=quick),
        },
    }
    assert text_width == state["token_embedding.weight"].shape[1]
    return ClipModel(of_model, to_hugging_face(state, *layers), to_preprocessor(model))


def _hugging_face_tower(config: Mapping[str, Any], part: str, *, quick: bool) -> dict[str, Any]:
    width = config[f"{part}.width"]
    tanh = config[f"{part}.act_kwargs"] == {"approximate": "tanh"}
    return {
        "hidden_size": width,
        "intermediate_size": int(width * config[f"{part}.mlp_ratio"]),
        "num_hidden_layers": config[f"{part}.layers"],
        "hidden_act": "quick_gelu" if quick else "gelu_pytorch_tanh" if tanh else "gelu",
        "layer_norm_eps": (config[f"{part}.norm_kwargs"] or {}).get("eps", _EPS),
    }


def _check_expressible(model: DualEncoder, config: Mapping[str, Any]) -> None:
    def refuse(reason: str) -> None:
        raise UserError(f"Hugging Face's CLIPModel cannot hold this model: {reason}")

    vision, text = model.config["vision_cfg"], model.config["text_cfg"]
    if vision.get("timm_model_name"):
        refuse(f"its image tower is timm's {vision['timm_model_name']}")
    if text.get("hf_model_name"):
        refuse(f"its text tower is Hugging Face's {text['hf_model_name']}")
    if config["vision_cfg.pool_type"] != "tok":
        refuse(f"it pools patches by {config['vision_cfg.pool_type']!r} and not by the class token")
    if config["text_cfg.pool_type"] not in ("argmax", "eos"):
        refuse(f"its text tower pools by {config['text_cfg.pool_type']!r} and not at the end of text")
    if model.clip.logit_bias is not None:
        refuse("it has a logit bias, of a sigmoid loss")
    if len(set(model.image_size)) > 1 or len(set(model.clip.visual.patch_size)) > 1:
        refuse("its images or patches are not square")
    defaults = spelled_out({"embed_dim": 1, "vision_cfg": {}, "text_cfg": {}})
    for key, value in config.items():
        checked = key not in _EXPRESSIBLE and not key.endswith(".pool_type")
        if checked and value != defaults.get(key):
            refuse(f"it has {key} {value!r}")
    for part in ("vision_cfg", "text_cfg"):
        if (config[f"{part}.act_kwargs"] or {"approximate": "tanh"}) != {"approximate": "tanh"}:
            refuse(f"it has {part}.act_kwargs {config[f'{part}.act_kwargs']!r}")
        if set(config[f"{part}.norm_kwargs"] or {}) - {"eps"}:
            refuse(f"it has {part}.norm_kwargs {config[f'{part}.norm_kwargs']!r}")


# ---- preprocessing ---------------------------------------------------------------------------------------------------

_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # PIL's numbers


def to_preprocessor(model: DualEncoder) -> dict[str, Any]:
    """`CLIPImageProcessor`'s config of a model's preprocessing."""
    settings, (height, width) = model.preprocess, model.image_size
    mode = settings.get("resize_mode", "shortest")
    if mode not in ("shortest", "squash"):
        raise UserError(
            f"Hugging Face's CLIPImageProcessor cannot prepare images as this model does: resize_mode {mode!r}"
        )
    whole = {"height": height, "width": width}
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": whole if mode == "squash" else {"shortest_edge": height},
        "resample": 2 if settings.get("interpolation") == "bilinear" else 3,
        "do_center_crop": mode == "shortest",
        "crop_size": whole,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(settings["mean"]),
        "image_std": list(settings["std"]),
    }


def from_preprocessor(config: Mapping[str, Any], image_size: int, where: str) -> dict[str, Any]:
    """open_clip's preprocess_cfg of a `CLIPImageProcessor`'s config; what it does otherwise is said."""
    resample = config.get("resample", 3)
    if resample not in _RESAMPLE or abs(config.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
        raise UserError(
            f"{where}: resample {resample} or rescale_factor {config.get('rescale_factor')} is not supported"
        )
    size = config.get("size", image_size)
    squash = isinstance(size, dict) and "height" in size and not config.get("do_center_crop", True)
    shortest = size if isinstance(size, int) else size.get("shortest_edge", size.get("height"))
    if shortest != image_size:
        log.warning(
            "%s: images are resized to %s and cropped to %s there; open_clip's transform resizes to %s at once",
            where, shortest, image_size, image_size,
        )  # fmt: skip
    normalize = config.get("do_normalize", True)
    clip_mean, clip_std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return {
        "mean": tuple(config.get("image_mean") or clip_mean) if normalize else (0.0, 0.0, 0.0),
        "std": tuple(config.get("image_std") or clip_std) if normalize else (1.0, 1.0, 1.0),
        "interpolation": _RESAMPLE[resample],
        "resize_mode": "squash" if squash else "shortest",
    }


# ---- folders ---------------------------------------------------------------------------------------------------------


def is_clip_model(folder: Path) -> bool:
    """Whether a folder holds a `CLIPModel`, or at least another model of Hugging Face."""
    return (folder / CONFIG_FILE).is_file() and "model_type" in _read_json(folder / CONFIG_FILE)


def read_clip_model(folder: Path, source: str | None = None) -> Blueprint:
    """The model in a `CLIPModel` folder, as open_clip's. `source` is what messages call it, by default the folder."""
    source = source or str(folder)
    config = _read_json(folder / CONFIG_FILE)
    try:
        model = to_model_config(config)
    except UserError as error:
        raise UserError(f"{source}/{CONFIG_FILE}: {error}") from None
    if _has_another_vocabulary(folder):
        model["text_cfg"]["hf_tokenizer_name"] = source
    preprocess = _read_preprocess(folder, model["vision_cfg"]["image_size"], source)
    return Blueprint(model, source, preprocess, partial(_fill, folder=folder, config=config, source=source), folder)


def _fill(clip: nn.Module, folder: Path, config: Mapping[str, Any], source: str) -> None:
    try:
        _, weights = from_clip_model(config, _read_weights(folder))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    fit_weights(clip, weights, source, "their own config")


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold a folder's weights."""
    if (folder / INDEX_FILE).is_file():
        named = _read_json(folder / INDEX_FILE).get("weight_map", {}).values()
        return sorted({Path(str(name)).name for name in named})
    return [next((name for name in WEIGHT_FILES if (folder / name).is_file()), WEIGHT_FILES[0])]


def _read_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name in weight_files(folder):
        path = folder / name
        if not path.is_file():
            raise UserError(f"no {path.name} beside {CONFIG_FILE}; looked for {', '.join(WEIGHT_FILES)}")
        try:
            if path.suffix == ".safetensors":
                weights |= safetensors.torch.load_file(path)
            else:
                weights |= torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file surfaces as anything from EOFError to SafetensorError
            raise UserError(f"{path.name} is not a readable weights file ({first_line(error)})") from error
    return weights


def _read_preprocess(folder: Path, image_size: int, source: str) -> dict[str, Any]:
    for name in (PREPROCESSOR_FILE, PROCESSOR_FILE):
        if (folder / name).is_file():
            content = _read_json(folder / name)
            content = content.get("image_processor", content) if name == PROCESSOR_FILE else content
            return from_preprocessor(content, image_size, f"{source}/{name}")
    log.warning("%s: no %s, so images are prepared as CLIP's", source, PREPROCESSOR_FILE)
    return {}


def _has_another_vocabulary(folder: Path) -> bool:
    """Whether a tokenizer lies beside the model that is not CLIP's own."""
    if (folder / "vocab.json").is_file():
        vocabulary = _read_json(folder / "vocab.json")
    elif (folder / "tokenizer.json").is_file():
        vocabulary = _read_json(folder / "tokenizer.json").get("model", {}).get("vocab", {})
    else:
        return False
    own = SimpleTokenizer()
    # The two libraries have other names for the start and the end of a text.
    special = {own.sot_token_id: "<|startoftext|>", own.eot_token_id: "<|endoftext|>"}
    named = {special.get(number, token): number for token, number in own.encoder.items()}
    return vocabulary not in (named, own.encoder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: a JSON object is needed, not {type(content).__name__}")
    return content
