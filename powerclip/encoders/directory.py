"""Models on disk, in open_clip's own layout: `open_clip_config.json` beside `open_clip_model.safetensors`."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch

from powerclip.encoders.dual import DualEncoder
from powerclip.encoders.models import Blueprint
from powerclip.encoders.transforms import Tokenizer
from powerclip.encoders.weights import WEIGHT_FILES, find_weights, load_weights
from powerclip.errors import UserError

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = WEIGHT_FILES[0]
TEXT_CONFIG_FILE = "config.json"  # of a text tower of Hugging Face that comes from no hub


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
        _write(model, draft, tokenizer, target)
        _move(draft, target)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{target}: could not save the model: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _write(model: DualEncoder, directory: Path, tokenizer: Tokenizer | None, target: Path) -> None:
    save_tokenizer = getattr(tokenizer, "save_pretrained", None)
    text = dict(model.config["text_cfg"])
    encoder = Path(text.get("hf_model_name") or "")
    if text.get("hf_model_name") and (encoder / TEXT_CONFIG_FILE).is_file():
        # It was read from a folder: it is copied into that of this model, whose place open_clip must be told.
        shutil.copyfile(encoder / TEXT_CONFIG_FILE, directory / TEXT_CONFIG_FILE)
        text["hf_model_name"] = str(target.absolute())
        if save_tokenizer is not None:
            text["hf_tokenizer_name"] = str(target.absolute())
    config = {"model_cfg": {**model.config, "text_cfg": text}, "preprocess_cfg": model.preprocess}
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = {name: value.detach().contiguous() for name, value in model.clip.state_dict().items()}
    safetensors.torch.save_file(weights, directory / WEIGHTS_FILE)
    # safetensors makes files that only their owner may read; give the weights the rights that the config got.
    shutil.copymode(directory / CONFIG_FILE, directory / WEIGHTS_FILE)
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


def stored(directory: Path) -> Blueprint:
    """The model in a directory of open_clip's layout."""
    content = read_config(directory / CONFIG_FILE)
    config, source, weights = dict(content["model_cfg"]), str(directory / CONFIG_FILE), find_weights(directory)
    text = config.get("text_cfg")
    if isinstance(text, dict) and (directory / TEXT_CONFIG_FILE).is_file():
        # The folder may have been moved since its config was written.
        places = [key for key in ("hf_model_name", "hf_tokenizer_name") if os.path.isabs(text.get(key) or "")]
        config["text_cfg"] = {**text, **dict.fromkeys(places, str(directory.absolute()))}
    fill = partial(load_weights, path=weights, source=source)
    return Blueprint(config, source, content.get("preprocess_cfg") or {}, fill, directory)


def read_config(path: Path) -> dict[str, Any]:
    """The content of an `open_clip_config.json`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable model config: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_cfg"), dict):
        raise UserError(f"{path}: a saved model's config needs 'model_cfg'")
    if not isinstance(content.get("preprocess_cfg") or {}, dict):
        raise UserError(f"{path}: preprocess_cfg is a mapping, not {type(content['preprocess_cfg']).__name__}")
    return content
