"""A small image–caption corpus read once: shards of a few thousand images, decoded and kept in memory.

For corpora that fit on the GPU (captions10k: 10,524 images of 128² are 0.5 GB). Shards are tars as img2dataset writes
them: `KEY.jpg` with `KEY.json` ({"captions": […]} or {"caption": …}) or `KEY.txt`. Trees come from a TSV file: key,
caption number, bracketed tree.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from powerclip.data.captions import CAPTION_SUFFIXES, IMAGE_SUFFIXES, content_hash, number_captions, split_member
from powerclip.data.trees import Tree, flat_tree, parse_bracketed
from powerclip.errors import UserError
from powerclip.runtime.progress import track

NO_IMAGE = "images not readable, left out"
NO_CAPTION = "images without a caption, left out"
NO_TREE = "captions without a tree, taken as flat"
WRONG_TREE = "captions that their tree does not match, taken as flat"


@dataclass(frozen=True)
class Origin:
    """Where an image comes from, by which its masks are found."""

    shard: Path
    image: int  # `content_hash` of its file


@dataclass(frozen=True)
class Corpus:
    """Images and their captions, in the order of the shards; the captions of an image lie together."""

    keys: list[str]
    images: Tensor  # [images, 3, size, size] uint8
    captions: list[str]
    image_of_caption: Tensor  # [captions]
    trees: list[Tree]
    fallbacks: dict[str, int] = field(default_factory=dict)  # what was left out or replaced, and how often
    origins: list[Origin] = field(default_factory=list)  # of each image

    def summary(self) -> str:
        """`1,000 images, 5,000 captions (2 images not readable, left out)`."""
        replaced = ", ".join(f"{count:,} {reason}" for reason, count in self.fallbacks.items())
        return f"{len(self.keys):,} images, {len(self.captions):,} captions" + (f" ({replaced})" if replaced else "")


def read_corpus(
    shards: Sequence[Path],
    size: int,
    trees: Path | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> Corpus:
    """Read shards, squash every image to `size`², and give every caption its tree (a flat one where none is known).

    A sample without a readable image or without a caption is counted and left out; a caption whose tree is missing or
    does not match is counted and gets a flat one.

    Args:
        shards: tar files.
        size: height and width of the images in memory.
        trees: a TSV file of bracketed trees, gzipped or not; None makes all trees flat, and counts none.
        threads: that decode images; as many as there are cores by default.
        progress: show a bar on a terminal.

    Raises:
        UserError: a file cannot be read, or no sample can be used.
    """
    known = None if trees is None else read_trees(trees)
    counts: Counter[str] = Counter()
    keys: list[str] = []
    origins: list[Origin] = []
    images: list[Tensor] = []
    captions: list[str] = []
    owners: list[int] = []
    parsed: list[Tree] = []
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        # The pool decodes ahead while this thread parses trees.
        for shard in track(shards, "reading", unit="shards", quiet=not progress):
            samples = list(_samples(shard))
            decoded = pool.map(lambda sample: _decode(sample.image, size), samples)
            for sample, pixels in zip(samples, decoded, strict=True):
                if pixels is None or not sample.captions:
                    counts[NO_IMAGE if pixels is None else NO_CAPTION] += 1
                    continue
                for number, caption in sample.captions:
                    parsed.append(_tree(caption, known, (sample.key, number), counts))
                    captions.append(caption)
                    owners.append(len(keys))
                keys.append(sample.key)
                origins.append(Origin(shard, content_hash(sample.image)))
                images.append(pixels)
    if not keys:
        found = ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "they are empty"
        raise UserError(f"no sample can be used of {', '.join(map(str, shards))}: {found}")
    return Corpus(keys, torch.stack(images), captions, torch.tensor(owners), parsed, dict(counts), origins)


def read_trees(path: Path) -> dict[tuple[str, int], str]:
    """Bracketed trees by key and caption number, from a TSV file, gzipped or not."""
    if not path.is_file():
        raise UserError(f"no file of trees {path}")
    trees = {}
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                fields = line.rstrip("\n").split("\t")
                if len(fields) != 3 or not fields[1].isdecimal():
                    raise UserError(f"{path}, line {number}: expected key, caption number and tree, separated by tabs")
                trees[fields[0], int(fields[1])] = fields[2]
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a file of trees: {error}") from None
    return trees


def _tree(
    caption: str, known: Mapping[tuple[str, int], str] | None, name: tuple[str, int], counts: Counter[str]
) -> Tree:
    if known is None:
        return flat_tree(caption)
    brackets = known.get(name)
    if brackets is None:
        counts[NO_TREE] += 1
        return flat_tree(caption)
    try:
        return parse_bracketed(brackets, caption)
    except UserError:
        counts[WRONG_TREE] += 1
        return flat_tree(caption)


@dataclass
class _Sample:
    key: str
    image: bytes = b""
    captions: list[tuple[int, str]] = field(default_factory=list)  # with their number, by which a tree is found


def _samples(shard: Path) -> Iterator[_Sample]:
    """The samples of one tar; members of a sample lie together and share their name up to the first dot."""
    sample: _Sample | None = None
    try:
        if shard.suffix == ".tar" and not _is_whole(shard):
            raise tarfile.ReadError("it is cut off, or no tar at all")
        with tarfile.open(shard) as tar:
            for member in tar:
                if not member.isfile():
                    continue
                key, suffix = split_member(member.name)
                if sample is None or key != sample.key:
                    if sample is not None:
                        yield sample
                    sample = _Sample(key)
                file = tar.extractfile(member)
                data = file.read() if file else b""
                if suffix in IMAGE_SUFFIXES:
                    sample.image = data
                elif suffix in CAPTION_SUFFIXES:
                    sample.captions = sample.captions or number_captions(data, suffix)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UserError(f"shard {shard} cannot be read: {error}; copy it again or leave it out") from error
    if sample is not None:
        yield sample


def _is_whole(shard: Path) -> bool:
    """Whether a tar ends as tars do, with blocks of zeros. tarfile itself takes a cut between members for the end."""
    with open(shard, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - tarfile.BLOCKSIZE))
        return size > 0 and size % tarfile.BLOCKSIZE == 0 and not any(file.read())


def _decode(data: bytes, size: int) -> Tensor | None:
    """An image as bytes [3, size, size], or None when it is not one."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as pixels:
            rgb = pixels.convert("RGB")
            if rgb.size != (size, size):
                rgb = rgb.resize((size, size), Image.Resampling.BICUBIC)
            return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
