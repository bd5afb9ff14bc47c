"""Models on disk, in open_clip's own layout: `open_clip_config.json` beside `open_clip_model.safetensors`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from powerclip.encoders.dual import DualEncoder
from powerclip.encoders.models import Blueprint, assemble, named
from powerclip.encoders.transforms import Preprocess, Tokenizer, preprocess_for, tokenizer_for
from powerclip.encoders.weights import WEIGHT_FILES, download, find_weights
from powerclip.errors import UserError, first_line

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = WEIGHT_FILES[0]
_LOCAL = "local-dir:"
_HUB = "hf-hub:"

log = logging.getLogger(__name__)


def load(
    path_or_name: str | Path, pretrained: str | None = None, device: str | torch.device = "cpu"
) -> tuple[DualEncoder, Preprocess, Tokenizer]:
    """Load a model, ready for inference, with its image transform and its tokenizer.

    Args:
        path_or_name: a directory that this package or open_clip saved, an open_clip model name (`ViT-B-16`, or with its
            weights `ViT-B-16/laion2b_s34b_b88k`), or a model on the hub (`hf-hub:org/model`).
        pretrained: with a name, the tag of its pretrained weights or a weights file.
        device: where to put the model.

    Raises:
        UserError: nothing of that name, or a damaged or incomplete model.
    """
    source = str(path_or_name)
    directory = Path(source.removeprefix(_LOCAL)).expanduser()
    if source.startswith(_LOCAL) or directory.is_dir():
        blueprint = _stored(directory)
    elif source.startswith(_HUB):
        blueprint = _on_hub(source.removeprefix(_HUB))
    else:
        blueprint = named(source, pretrained)
        pretrained = None
    if pretrained is not None:
        raise UserError(f"{source} brings its own weights: leave out pretrained={pretrained!r}")
    if blueprint.weights is None:
        log.warning("%s: no pretrained weights asked for, the model is initialised at random", source)
    model = _to_device(assemble(blueprint), device).eval()
    return model, preprocess_for(model), tokenizer_for(model, directory if directory.is_dir() else None)


def save(model: DualEncoder, directory: str | Path, tokenizer: Tokenizer | None = None) -> Path:
    """Write `model` as an open_clip directory, which open_clip reads as `local-dir:…`; all of it or nothing.

    Args:
        model: what to write.
        directory: created with its parents; the model files of an existing one are replaced, others stay.
        tokenizer: written beside the model if it is a Hugging Face one, which open_clip then expects there.
    """
    target = Path(directory).expanduser()
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: cannot save a model there, it is a file")
    draft = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    try:
        draft.mkdir(parents=True)
        _write(model, draft, tokenizer)
        _move(draft, target)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{target}: could not save the model: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _write(model: DualEncoder, directory: Path, tokenizer: Tokenizer | None) -> None:
    preprocess = {name: value for name, value in model.clip.visual.preprocess_cfg.items() if name != "size"}
    config = {"model_cfg": model.config, "preprocess_cfg": preprocess}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {name: value.detach().contiguous() for name, value in model.clip.state_dict().items()}
    safetensors.torch.save_file(weights, directory / WEIGHTS_FILE)
    # safetensors makes files that only their owner may read; give the weights the rights that the config got.
    shutil.copymode(directory / CONFIG_FILE, directory / WEIGHTS_FILE)
    save_tokenizer = getattr(tokenizer, "save_pretrained", None)
    if save_tokenizer is not None:
        save_tokenizer(directory)


def _move(draft: Path, target: Path) -> None:
    """Put the finished `draft` in place: at once when `target` is new, else one whole file after the other."""
    for path in draft.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if not target.exists():
        draft.rename(target)
        return
    for path in sorted(draft.iterdir()):
        path.replace(target / path.name)


def _stored(directory: Path) -> Blueprint:
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    config = directory / CONFIG_FILE
    if not config.is_file():
        raise UserError(f"{directory}: no {CONFIG_FILE} here, so this is not a saved model")
    content = _read_config(config)
    return Blueprint(content["model_cfg"], str(config), content.get("preprocess_cfg") or {}, find_weights(directory))


def _on_hub(model_id: str) -> Blueprint:
    source = f"{_HUB}{model_id}"
    content = _read_config(download({"hf_hub": f"{model_id}/{CONFIG_FILE}"}, f"the config of {source}"))
    # The trailing slash is open_clip's way to ask for the weights file under its usual names.
    weights = download({"hf_hub": f"{model_id}/"}, f"the weights of {source}")
    return Blueprint(content["model_cfg"], source, content.get("preprocess_cfg") or {}, weights, convert=True)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable model config: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_cfg"), dict):
        raise UserError(f"{path}: a saved model's config needs 'model_cfg'")
    if not isinstance(content.get("preprocess_cfg") or {}, dict):
        raise UserError(f"{path}: preprocess_cfg is a mapping, not {type(content['preprocess_cfg']).__name__}")
    return content


def _to_device(model: DualEncoder, device: str | torch.device) -> DualEncoder:
    try:
        return model.to(device)
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"cannot use device {str(device)!r}: {first_line(error)}") from error
