"""What turns images and captions into a model's input: open_clip's preprocessing and tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol

from open_clip import SimpleTokenizer
from open_clip.tokenizer import HFTokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2
from torch import Tensor

from powerclip.encoders.dual import DualEncoder
from powerclip.errors import UserError, first_line

if TYPE_CHECKING:
    from PIL import Image

Preprocess = Callable[["Image.Image"], Tensor]  # an image → [3, H, W], normalised


class Tokenizer(Protocol):
    """An open_clip tokenizer."""

    context_length: int

    def __call__(self, texts: str | list[str], context_length: int | None = None) -> Tensor:
        """Token ids [C, context_length], padded."""
        ...


def preprocess_for(
    model: DualEncoder, *, resize_mode: Literal["shortest", "longest", "squash"] | None = None
) -> Preprocess:
    """The evaluation transform of `model`: resize, crop or pad, normalise; `resize_mode` replaces the model's own."""
    settings = model.clip.visual.preprocess_cfg
    return image_transform_v2(PreprocessCfg(**settings | ({"resize_mode": resize_mode} if resize_mode else {})), False)


def tokenizer_for(model: DualEncoder) -> Tokenizer:
    """The open_clip tokenizer of `model`, which reads as many tokens as the model does.

    A Hugging Face tokenizer is taken from the folder that the model was read from, or downloaded. The model learns
    from it which id pads captions.
    """
    directory = model.directory
    text = model.config["text_cfg"]
    options: dict[str, Any] = text.get("tokenizer_kwargs") or {}
    name = text.get("hf_tokenizer_name")
    if not name:
        try:
            return SimpleTokenizer(context_length=model.context_length, **options)
        except TypeError as error:
            raise UserError(f"text_cfg.tokenizer_kwargs: {first_line(error)}") from error
    stored = directory is not None and any(directory.glob("tokenizer*"))
    try:
        tokenizer = HFTokenizer(
            str(directory) if stored else name,
            context_length=model.context_length,
            tokenizer_mode=text.get("tokenizer_mode"),
            **options,
        )
    # transformers, the hub and the network raise a dozen unrelated types.
    except Exception as error:
        raise UserError(f"could not get the tokenizer {directory if stored else name}: {first_line(error)}") from error
    if tokenizer.tokenizer.pad_token_id is not None:
        # A tower that reads the padding, as SigLIP's, was trained with the tokenizer's; configs do not name it.
        model.pad_id = tokenizer.tokenizer.pad_token_id
    return tokenizer
