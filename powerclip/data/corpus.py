"""A small image–caption corpus read once: shards of a few thousand images, decoded and kept in memory.

For corpora that fit on the GPU (captions10k: 10,524 images of 128² are 0.5 GB). Shards are tars as img2dataset writes
them: `KEY.jpg` with `KEY.json` ({"captions": […]} or {"caption": …}) or `KEY.txt`. Trees come from the sidecars of the
shards, or from a TSV file: key, caption number, bracketed tree.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from powerclip.data import tar_index
from powerclip.data.captions import content_hash
from powerclip.data.decode import decode_squashed
from powerclip.data.sidecar import Miss, find_sidecars, read_trees, sidecar_path
from powerclip.data.tar_index import TarIndex, make_index, sample_captions
from powerclip.data.trees import Tree, flat_tree, parse_bracketed, tree_from_spans
from powerclip.errors import UserError
from powerclip.runtime.progress import track

NO_IMAGE = "images not readable, left out"
NO_CAPTION = "images without a caption, left out"
# Why a caption has a flat tree.
NO_TREE = "captions without a tree, taken as flat"
WRONG_TREE = "captions that their tree does not match, taken as flat"
STALE_TREE = "captions that changed since they were parsed, taken as flat"
UNPARSED = "captions that the parser left flat"


@dataclass(frozen=True)
class TreeSidecars:
    """Trees from the sidecars of the shards, in `folder` or beside the shards."""

    folder: Path | None = None


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

    @property
    def trees_missing(self) -> int:
        """Captions for which trees were asked for, and none that belongs to them was found."""
        return sum(self.fallbacks.get(reason, 0) for reason in (NO_TREE, WRONG_TREE, STALE_TREE))

    def summary(self) -> str:
        """`1,000 images, 5,000 captions (2 images not readable, left out)`."""
        replaced = ", ".join(f"{count:,} {reason}" for reason, count in self.fallbacks.items())
        return f"{len(self.keys):,} images, {len(self.captions):,} captions" + (f" ({replaced})" if replaced else "")


def read_corpus(
    shards: Sequence[Path],
    size: int,
    trees: Path | TreeSidecars | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> Corpus:
    """Read shards, squash every image to `size`², and give every caption its tree (a flat one where none is known).

    A sample without a readable image or without a caption is counted and left out; a caption whose tree is missing or
    does not match is counted and gets a flat one.

    Args:
        shards: tar files.
        size: height and width of the images in memory.
        trees: a TSV file of bracketed trees, gzipped or not, or sidecars; None makes all trees flat, and counts none.
        threads: that decode images; as many as there are cores by default.
        progress: show a bar on a terminal.

    Raises:
        UserError: a file cannot be read, or no sample can be used.
    """
    known = read_tree_file(trees) if isinstance(trees, Path) else {}
    counts: Counter[str] = Counter()
    keys: list[str] = []
    origins: list[Origin] = []
    images: list[Tensor] = []
    captions: list[str] = []
    owners: list[int] = []
    parsed: list[Tree] = []
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for shard in track(shards, "reading", unit="shards", quiet=not progress):
            find_tree = _tree_finder(trees, known, shard)
            # The pool decodes ahead while this thread parses trees.
            for sample in _read_shard(shard, size, pool, counts):
                if sample.pixels is None or not sample.captions:
                    counts[NO_IMAGE if sample.pixels is None else NO_CAPTION] += 1
                    continue
                for number, caption in sample.captions:
                    tree = find_tree(sample.key, number, caption)
                    if isinstance(tree, str):
                        counts[tree] += 1
                        tree = flat_tree(caption)
                    parsed.append(tree)
                    captions.append(caption)
                    owners.append(len(keys))
                keys.append(sample.key)
                origins.append(Origin(shard, sample.hash))
                images.append(sample.pixels)
    if not keys:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "they are empty"
        raise UserError(f"no sample can be used of {', '.join(map(str, shards))}: {reasons}")
    return Corpus(keys, torch.stack(images), captions, torch.tensor(owners), parsed, dict(counts), origins)


# ---- trees -----------------------------------------------------------------------------------------------------------

# Key, caption number and caption → the tree, or the reason why it is flat.
_TreeFinder = Callable[[str, int, str], Tree | str]


def find_trees(shards: Sequence[Path], folder: Path | None = None) -> TreeSidecars | None:
    """The sidecars of trees in `folder` or beside the shards; None when no shard has one."""
    return TreeSidecars(folder) if find_sidecars(shards, "trees", folder) else None


def read_tree_file(path: Path) -> dict[tuple[str, int], str]:
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


def _tree_finder(trees: Path | TreeSidecars | None, known: dict[tuple[str, int], str], shard: Path) -> _TreeFinder:
    """How the trees of a shard's captions are found; `known` are those of a file."""
    if trees is None:
        return lambda key, number, caption: flat_tree(caption)
    if isinstance(trees, Path):

        def in_file(key: str, number: int, caption: str) -> Tree | str:
            brackets = known.get((key, number))
            if brackets is None:
                return NO_TREE
            try:
                return parse_bracketed(brackets, caption)
            except UserError:
                return WRONG_TREE

        return in_file
    path = sidecar_path(shard, "trees", trees.folder)
    sidecar = read_trees(path) if path.exists() else None

    def in_sidecar(key: str, number: int, caption: str) -> Tree | str:
        spans = Miss.NO_ROW if sidecar is None else sidecar.spans(key, caption)
        if isinstance(spans, Miss) or sidecar is None:
            return NO_TREE if spans is Miss.NO_ROW else STALE_TREE
        if sidecar.fallback(key, caption):
            return UNPARSED
        try:
            return tree_from_spans(spans, caption)
        except UserError:
            return WRONG_TREE

    return in_sidecar


# ---- samples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sample:
    key: str
    pixels: Tensor | None  # None: the image is not readable
    hash: int  # of the image's file
    captions: list[tuple[int, str]]  # with their number, by which a tree is found in a file


def _read_shard(shard: Path, size: int, pool: ThreadPoolExecutor, counts: Counter[str]) -> Iterator[_Sample]:
    """The samples of one tar that have an image and a caption; the others are counted."""
    try:
        index = make_index(shard)
        if index.info.damage:
            raise UserError(f"shard {shard} cannot be read: {index.info.damage}; copy it again or leave it out")
        for reason, counted in ((tar_index.NO_IMAGE, NO_IMAGE), (tar_index.NO_CAPTION, NO_CAPTION)):
            if reason in index.info.left_out:
                counts[counted] += index.info.left_out[reason]
        file = os.open(shard, os.O_RDONLY)
        try:
            yield from pool.map(lambda number: _read_sample(file, index, number, size), range(len(index)))
        finally:
            os.close(file)
    except OSError as error:
        raise UserError(f"shard {shard} cannot be read: {error}; copy it again or leave it out") from error


def _read_sample(file: int, index: TarIndex, number: int, size: int) -> _Sample:
    image = index.image(number)
    data = os.pread(file, image.size, image.offset)
    captions = sample_captions(file, index, number)
    return _Sample(index.keys[number], decode_squashed(data, size), content_hash(data), captions)
