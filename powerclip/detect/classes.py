"""What a detector may name: classes with their split, and their directions in the joint space.

The text embedding is all that names a class, so any phrase can be one. OV-COCO's split lies in `ov_coco.json`.

Axes: K classes · D width of the joint space
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.errors import UserError
from powerclip.evaluate.metrics import class_embeddings

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder
    from powerclip.encoders.transforms import Tokenizer

# A class is the mean of its prompts. Few, and such as people write: the towers may have read captions only.
TEMPLATES = (
    "a photo of {c}.",
    "{c}",
    "there is {c} in the picture.",
    "a close-up of {c}.",
    "{c} in the background.",
)

_ARTICLE = re.compile(r"(a|an|the|some|two|three|several)\s", re.IGNORECASE)
_CONSONANT = re.compile(r"(uni(?!n)|use|eu|one\b)", re.IGNORECASE)  # vowels that are spoken as consonants
_PLURAL = re.compile(r"[^su]s$", re.IGNORECASE)


@dataclass(frozen=True)
class Classes:
    """Names, in the order of their labels, and which of them training never shows."""

    names: tuple[str, ...]
    novel: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise UserError(f"the class {twice!r} is named twice")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def base(self) -> tuple[str, ...]:
        """The names that training shows."""
        return tuple(name for name, novel in zip(self.names, self.novel, strict=True) if not novel)

    def numbers(self, *, novel: bool) -> list[int]:
        """The labels of one part."""
        return [number for number, one in enumerate(self.novel) if one == novel]


@functools.cache
def ov_coco() -> dict[str, list[str]]:
    """The names of OV-COCO's `base` and of its `novel` classes."""
    content: dict[str, list[str]] = json.loads(
        files("powerclip.detect").joinpath("ov_coco.json").read_text(encoding="utf-8")
    )
    return content


def with_article(name: str) -> str:
    """A class's name as a caption would mention it: `umbrella` → `an umbrella`; `a red dog` and `skis` stay."""
    name = " ".join(name.split())
    if _ARTICLE.match(name) or _PLURAL.search(name):
        return name
    vowel = name[:1].lower() in "aeiou" and not _CONSONANT.match(name)
    return f"{'an' if vowel else 'a'} {name}"


def embed_classes(
    encoder: DualEncoder, tokenizer: Tokenizer, names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> Tensor:
    """Normalised directions of classes [K, D] on the encoder's device: zero-shot classification's, by its templates."""
    from powerclip.data.tokens import CaptionTokenizer
    from powerclip.evaluate.embedder import Embedder

    embedder = Embedder(encoder, CaptionTokenizer(tokenizer))
    directions = class_embeddings(embedder.texts, [with_article(name) for name in names], templates)
    return directions.to(embedder.device, torch.float32)
