"""Shards and sidecars, made in a moment: images that say where a pixel is, captions that name their sample."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from mini_corpus import write_shard
from PIL import Image

from powerclip.annotate.writer import RegionRows, TreeRows, write_sidecar
from powerclip.data.batch import BatchSpec
from powerclip.data.captions import content_hash
from powerclip.data.mask_codec import GRID, pack_mask
from powerclip.data.shard_loader import ShardLoader, ShardOptions
from powerclip.data.shards import open_shards
from powerclip.data.sidecar import Annotator, Kind, SidecarInfo, sidecar_path
from powerclip.data.tokens import CaptionTokenizer
from powerclip.data.trees import Span
from powerclip.runtime.distributed import SINGLE, Ranks

TOKENIZER = CaptionTokenizer()
OPTIONS = {field.name for field in fields(ShardOptions)}

Members = list[tuple[str, bytes | str]]


def ramp(width: int, height: int, blue: int = 0) -> Image.Image:
    """Red grows to the right, green downwards; blue tells one image from another."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = ((np.arange(width) + 0.5) / width * 255).round()
    pixels[..., 1] = ((np.arange(height) + 0.5) / height * 255).round()[:, None]
    pixels[..., 2] = blue
    return Image.fromarray(pixels)


def encoded(image: Image.Image, form: str = "png", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def caption_of(key: str) -> str:
    return f"a dog sitting on a red chair, {key}"


def spans_of(caption: str) -> list[Span]:
    """The phrases of `caption_of`'s captions: the whole, "a dog", "sitting on a red chair", "a red chair"."""
    phrases = {"a dog": "NP", "sitting on a red chair": "VP", "a red chair": "NP"}
    spans = [(caption.index(text), caption.index(text) + len(text), label) for text, label in phrases.items()]
    return [Span(0, len(caption), "S"), *(Span(*span) for span in spans)]


def sample(key: str, image: bytes | None = None, caption: bytes | str | None = None, suffix: str = "png") -> Members:
    """An image and a text file."""
    number = int("".join(filter(str.isdigit, key)) or 0)
    image = encoded(ramp(24, 18, number % 256)) if image is None else image
    return [(f"{key}.{suffix}", image), (f"{key}.txt", caption_of(key) if caption is None else caption)]


def write_samples(folder: Path, sizes: Sequence[int], first: int = 0) -> list[Path]:
    """`00000.tar`, … with so many samples each, numbered through: `s0000`, `s0001`, …"""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for shard, size in enumerate(sizes):
        members = [member for number in range(first, first + size) for member in sample(f"s{number:04d}")]
        paths.append(write_shard(folder / f"{shard:05d}.tar", members))
        first += size
    return paths


def info(kind: Kind, shard: Path, samples: int) -> SidecarInfo:
    status = shard.stat()
    return SidecarInfo(
        kind, Annotator("example", "1"), shard.name, f"{status.st_size}:{status.st_mtime_ns}", samples, 0
    )


def write_trees(shard: Path, captions: dict[str, str | list[str]], folder: Path | None = None) -> Path:
    """A sidecar with `spans_of` for captions of the form that `caption_of` gives."""
    rows = TreeRows()
    for key, listed in captions.items():
        texts = [listed] if isinstance(listed, str) else listed
        rows.key.append(key)
        rows.caption.append([content_hash(text) for text in texts])
        rows.spans.append([spans_of(text) for text in texts])
        rows.fallback.append([None] * len(texts))
    path = sidecar_path(shard, "trees", folder)
    write_sidecar(path, info("trees", shard, len(rows.key)), rows)
    return path


def write_regions(
    shard: Path, masks: dict[str, list[np.ndarray]], images: dict[str, bytes], folder: Path | None = None
) -> Path:
    rows = RegionRows()
    for key, listed in masks.items():
        rows.key.append(key)
        rows.image.append(content_hash(images[key]))
        rows.masks.append([pack_mask(mask) for mask in listed])
        rows.fallback.append(None)
    path = sidecar_path(shard, "regions", folder)
    write_sidecar(path, info("regions", shard, len(rows.key)), rows)
    return path


def block(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    """The mask of a rectangle, given in shares of the image that fall on its cells."""
    mask = np.zeros((GRID, GRID), np.bool_)
    mask[round(top * GRID) : round(bottom * GRID), round(left * GRID) : round(right * GRID)] = True
    return mask


def many_captions(key: str, captions: list[str]) -> Members:
    return [(f"{key}.png", encoded(ramp(20, 20))), (f"{key}.json", json.dumps({"captions": captions}))]


def loader(paths: Sequence[Path], ranks: Ranks = SINGLE, warn=None, **settings: object) -> ShardLoader:
    """Batches of 4 without trees, but for what `settings` of the spec or of the options say."""
    options = ShardOptions(**{"trees": False} | {name: settings.pop(name) for name in OPTIONS & settings.keys()})
    spec = BatchSpec(**{"image_size": (16, 16), "grid": (2, 2), "batch_size": 4, "regions": 3} | settings)
    shards = open_shards(list(paths), options.sidecars, strict=options.strict, max_bad=options.max_bad)
    return ShardLoader(shards, spec, TOKENIZER, options, ranks, warn)
