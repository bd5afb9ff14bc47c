"""SugarCrepe (Hsieh et al., NeurIPS 2023): is a photograph's caption preferred to a fluent one that is false?

A folder holds `replace_obj.json`, `swap_att.json`, … as SugarCrepe publishes them, {"0": {"filename", "caption",
"negative_caption"}, …}, and the images (COCO val2017) in `images/`. Items whose image is not there are counted and
left out.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from powerclip.data.tokens import CaptionTokenizer
from powerclip.errors import UserError
from powerclip.evaluate.composition import KINDS, accuracy_by_kind, group_means, prefers_caption
from powerclip.evaluate.embeddings import BATCH, device_of, embed_texts, evaluating

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder


@dataclass(frozen=True)
class Item:
    """One comparison."""

    kind: str
    image: Path
    caption: str
    negative: str


@dataclass(frozen=True)
class SugarCrepe:
    """The comparisons whose image is there, and how many are not."""

    items: tuple[Item, ...]
    missing: int

    def summary(self) -> str:
        """`517 comparisons (6,994 left out: their images are not there)`."""
        left_out = f" ({self.missing:,} left out: their images are not there)" if self.missing else ""
        return f"{len(self.items):,} comparisons{left_out}"


@dataclass(frozen=True)
class CompositionResults:
    """Shares of preferred captions (0 to 1)."""

    accuracy: dict[str, float]  # kind → accuracy
    counts: dict[str, int]  # kind → comparisons
    missing: int  # comparisons left out for want of their image

    @property
    def mean(self) -> float:
        """The mean over all comparisons."""
        total = sum(self.counts.values())
        return sum(self.accuracy[kind] * count for kind, count in self.counts.items()) / total

    @property
    def error(self) -> float:
        """The standard error of `mean`, for comparisons that are drawn independently."""
        return math.sqrt(self.mean * (1 - self.mean) / sum(self.counts.values()))

    @property
    def groups(self) -> dict[str, float]:
        """The paper's Obj, Att and Rel."""
        return group_means(self.accuracy)


def read_sugarcrepe(folder: Path, images: Path | None = None) -> SugarCrepe:
    """The comparisons in a folder; `images` is where the images are, `folder/images` by default.

    Raises:
        UserError: the folder holds none of SugarCrepe's files, one is damaged, or no image is there.
    """
    files = [(kind, folder / f"{kind}.json") for kind in KINDS if (folder / f"{kind}.json").is_file()]
    if not files:
        raise UserError(f"{folder} holds none of SugarCrepe's files ({KINDS[0]}.json, …)")
    images = images or folder / "images"
    items = [item for kind, path in files for item in read_items(path, kind, images)]
    there = {image for image in {item.image for item in items} if image.is_file()}
    kept = tuple(item for item in items if item.image in there)
    if not kept:
        raise UserError(f"{images} holds none of the images that the files in {folder} name")
    return SugarCrepe(kept, len(items) - len(kept))


def evaluate_sugarcrepe(encoder: DualEncoder, tokenizer: CaptionTokenizer, benchmark: SugarCrepe) -> CompositionResults:
    """Accuracy of each kind, by global embeddings; images are prepared as the model wants them."""
    items = benchmark.items
    with evaluating(encoder):
        images = _embed(encoder, [item.image for item in items])
        captions = embed_texts(encoder, tokenizer, [item.caption for item in items])
        negatives = embed_texts(encoder, tokenizer, [item.negative for item in items])
        preferred = prefers_caption(images, captions, negatives)
    kinds = [item.kind for item in items]
    accuracy, counts = accuracy_by_kind(preferred, kinds), Counter(kinds)
    return CompositionResults(accuracy, {kind: counts[kind] for kind in accuracy}, benchmark.missing)


def read_items(path: Path, kind: str, images: Path) -> list[Item]:
    """The comparisons of one file; an item that says its own `kind` has that one.

    Raises:
        UserError: the file is not in SugarCrepe's format.
    """
    try:
        entries: Any = json.loads(path.read_text(encoding="utf-8"))
        rows = list(entries.values()) if isinstance(entries, Mapping) else entries
        items = [
            Item(row.get("kind", kind), images / row["filename"], row["caption"], row["negative_caption"])
            for row in rows
        ]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{path}: expected items with filename, caption and negative_caption") from None
    for number, item in enumerate(items):
        if not all(isinstance(text, str) for text in (item.kind, item.caption, item.negative)):
            raise UserError(f"{path}, item {number}: kind, caption and negative_caption must be texts")
    return items


def _embed(encoder: DualEncoder, paths: list[Path]) -> Tensor:
    """Embeddings [items, D]; several items share an image, and it is encoded once."""
    from PIL import Image

    from powerclip.encoders import preprocess_for

    prepare, device = preprocess_for(encoder), device_of(encoder)
    number = {image: at for at, image in enumerate(dict.fromkeys(paths))}
    unique, parts = list(number), []
    for start in range(0, len(unique), BATCH):
        pixels = []
        for image in unique[start : start + BATCH]:
            try:
                with Image.open(image) as opened:
                    pixels.append(prepare(opened.convert("RGB")))
            except (OSError, ValueError, SyntaxError) as error:
                raise UserError(f"{image} cannot be read as an image: {error}") from None
        parts.append(encoder.encode_image(torch.stack(pixels).to(device)).float())
    return torch.cat(parts)[torch.tensor([number[image] for image in paths], device=device)]
