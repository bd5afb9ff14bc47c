"""What prepares the input of an exported model, as files that transformers reads: tokenizer and image processor."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from powerclip.encoders import DualEncoder
from powerclip.encoders.hugging_face import PREPROCESSOR_FILE, to_preprocessor
from powerclip.encoders.transforms import Tokenizer
from powerclip.errors import UserError

# transformers' names of what open_clip calls <start_of_text> and <end_of_text>: those that CLIPTokenizer expects.
_SPECIAL = ("<|startoftext|>", "<|endoftext|>")
# What transformers notes about where a tokenizer was read from; it says nothing about the tokenizer.
_ABOUT_LOADING = ("is_local", "local_files_only", "name_or_path")


def write_processor(model: DualEncoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer and image processor of `model` into `folder`.

    Raises:
        UserError: transformers is missing, or has no form for one of the two.
    """
    require_transformers()
    settings = image_processor(model)
    (folder / PREPROCESSOR_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save = getattr(tokenizer, "save_pretrained", None)
    if save is not None:  # a Hugging Face tokenizer
        with transformers_only_errors():
            save(folder)
        return
    _write_clip_tokenizer(model, tokenizer, folder)


def image_processor(model: DualEncoder) -> dict[str, Any]:
    """The model's preprocessing as the settings of a `CLIPImageProcessor`.

    Raises:
        UserError: it resizes in a way that a CLIPImageProcessor has no setting for.
    """
    height, width = model.image_size
    if model.preprocess.get("resize_mode", "shortest") == "shortest" and height != width:
        raise UserError(
            f"Hugging Face's CLIPImageProcessor cannot crop images to {height}×{width} pixels as this model does: "
            "resize_mode 'shortest' works for squares, and 'squash' for other shapes"
        )
    return to_preprocessor(model)


def _write_clip_tokenizer(model: DualEncoder, tokenizer: Any, folder: Path) -> None:
    """open_clip's own BPE as a `CLIPTokenizer`: the same merges, the same ids."""
    options = model.config["text_cfg"].get("tokenizer_kwargs")
    if options:
        raise UserError(f"text_cfg.tokenizer_kwargs ({', '.join(options)}) have no counterpart in a CLIPTokenizer")
    from transformers import CLIPTokenizerFast  # type: ignore[attr-defined]  # an alias in newer releases

    special = dict(zip((tokenizer.sot_token_id, tokenizer.eot_token_id), _SPECIAL, strict=True))
    vocabulary = {special.get(number, token): number for token, number in tokenizer.encoder.items()}
    merges = sorted(tokenizer.bpe_ranks, key=tokenizer.bpe_ranks.get)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with transformers_only_errors():
        CLIPTokenizerFast.from_pretrained(folder, model_max_length=model.context_length).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in _ABOUT_LOADING}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def require_transformers() -> None:
    """UserError when transformers is missing."""
    import importlib.util

    if importlib.util.find_spec("transformers") is None:
        raise UserError("the files of a tokenizer need transformers: pip install 'powerclip[export]'")


@contextmanager
def transformers_only_errors() -> Iterator[None]:
    """Silence transformers' advice and its progress bars, which are not about the user's command."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    shown = transformers_logging.is_progress_bar_enabled()
    parallel = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads, and no warning when a process is forked
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()
        if parallel is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
