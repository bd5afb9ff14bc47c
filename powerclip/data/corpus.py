"""A small image–caption corpus read once: shards of a few thousand pictures, decoded and kept in memory.

For corpora that fit on the GPU (captions10k: 12,524 pictures of 128², 0.6 GB). Shards are tars as img2dataset writes:
`KEY.jpg` with `KEY.json` ({"captions": […]} or {"caption": …}) or `KEY.txt`. Trees come from a TSV file: key, caption
number, bracketed tree.
"""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from powerclip.alignment.trees import Tree, flat_tree, parse_bracketed
from powerclip.errors import UserError

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")


@dataclass(frozen=True)
class Corpus:
    """Pictures and their captions, in the order of the shards."""

    keys: list[str]
    images: Tensor  # [images, 3, size, size] uint8
    captions: list[str]
    image_of_caption: Tensor  # [captions]
    trees: list[Tree]
    fallbacks: dict[str, int] = field(default_factory=dict)  # what was skipped or replaced, and how often


def expand(pattern: str) -> list[Path]:
    """Shards that a path, a glob pattern or an environment variable inside it stands for; none is an error."""
    expanded = os.path.expanduser(os.path.expandvars(pattern))
    if "$" in expanded:
        raise UserError(f"data.shards: {pattern}: the environment variable is not set")
    paths = sorted(map(Path, glob.glob(expanded)))
    if not paths:
        raise UserError(f"data.shards: nothing matches {expanded}")
    return paths


def read_corpus(shards: Sequence[Path], size: int, trees: Path | None = None, threads: int | None = None) -> Corpus:
    """Read shards, squash every picture to `size`², and give every caption its tree (a flat one where none is known).

    A sample without a readable picture or without a caption is counted and skipped; so is a tree that does not fit
    its caption.
    """
    known = read_trees(trees) if trees else {}
    samples = [sample for shard in shards for sample in _samples(shard)]
    skipped: dict[str, int] = {}

    def count(reason: str) -> None:
        skipped[reason] = skipped.get(reason, 0) + 1

    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        pictures = list(pool.map(lambda sample: _decode(sample.image, size), samples))
    keys: list[str] = []
    images: list[Tensor] = []
    captions: list[str] = []
    owners: list[int] = []
    parsed: list[Tree] = []
    for sample, picture in zip(samples, pictures, strict=True):
        if picture is None:
            count("picture not readable")
            continue
        if not sample.captions:
            count("no caption")
            continue
        for number, caption in enumerate(sample.captions):
            tree = known.get((sample.key, number))
            if tree is None and known:
                count("no tree: flat")
            try:
                parsed.append(parse_bracketed(tree, caption) if tree else flat_tree(caption))
            except UserError:
                count("tree does not match: flat")
                parsed.append(flat_tree(caption))
            captions.append(caption)
            owners.append(len(keys))
        keys.append(sample.key)
        images.append(picture)
    if not keys:
        raise UserError(f"no readable sample in {', '.join(map(str, shards))}")
    return Corpus(keys, torch.stack(images), captions, torch.tensor(owners), parsed, skipped)


def read_trees(path: Path) -> dict[tuple[str, int], str]:
    """Bracketed trees by key and caption number, from a TSV file, gzipped or not."""
    if not path.is_file():
        raise UserError(f"data.trees: {path} does not exist")
    trees = {}
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            fields = line.rstrip("\n").split("\t")
            if len(fields) != 3 or not fields[1].isdigit():
                raise UserError(f"{path}:{number}: expected key, caption number and tree, separated by tabs")
            trees[fields[0], int(fields[1])] = fields[2]
    return trees


@dataclass
class _Sample:
    key: str
    image: bytes = b""
    captions: list[str] = field(default_factory=list)


def _samples(shard: Path) -> Iterator[_Sample]:
    """The samples of one tar; members of a sample lie together and share their name up to the first dot."""
    sample: _Sample | None = None
    try:
        with tarfile.open(shard) as tar:
            for member in tar:
                if not member.isfile():
                    continue
                stem, _, suffix = Path(member.name).name.partition(".")
                if sample is None or stem != sample.key:
                    if sample is not None:
                        yield sample
                    sample = _Sample(stem)
                file = tar.extractfile(member)
                data = file.read() if file else b""
                if suffix.lower() in IMAGE_SUFFIXES:
                    sample.image = data
                elif suffix.lower() in ("json", "txt"):
                    sample.captions = sample.captions or _captions(data, suffix.lower())
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{shard} cannot be read: {error}") from error
    if sample is not None:
        yield sample


def _captions(data: bytes, suffix: str) -> list[str]:
    text = data.decode("utf-8", errors="replace")
    if suffix == "txt":
        return [text.strip()] if text.strip() else []
    try:
        fields: Any = json.loads(text)
    except json.JSONDecodeError:
        return []
    found = fields.get("captions") or fields.get("caption") if isinstance(fields, dict) else None
    captions = [found] if isinstance(found, str) else found or []
    return [caption for caption in captions if isinstance(caption, str) and caption.strip()]


def _decode(data: bytes, size: int) -> Tensor | None:
    """A picture as bytes [3, size, size], or None when it is not one."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as picture:
            rgb = picture.convert("RGB")
            if rgb.size != (size, size):
                rgb = rgb.resize((size, size), Image.Resampling.BICUBIC)
            return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
