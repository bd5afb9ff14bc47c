"""One shard, from its tar to its sidecar: what is there is kept, what is stale or missing is annotated.

A shard is done when its sidecar says so: made by the same annotator (name, version, options) from a tar of the same
size and time. When the tar has changed, rows whose caption or picture has not are taken over.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from powerclip.annotate.parsers import Parsed, Parser
from powerclip.annotate.pictures import decode_picture
from powerclip.annotate.segmenters.base import Masks, Picture, Segmenter
from powerclip.annotate.shards import fingerprint, local_copy
from powerclip.annotate.writer import RegionRows, TreeRows, write_sidecar
from powerclip.data.captions import content_hash, read_captions
from powerclip.data.mask_codec import pack_mask
from powerclip.data.sidecar import (
    Annotator,
    Kind,
    Miss,
    RegionSidecar,
    SidecarError,
    SidecarInfo,
    TreeSidecar,
    read_info,
    read_regions,
    read_trees,
    sidecar_path,
)
from powerclip.data.tar_index import TarIndex, make_index
from powerclip.errors import UserError

NOT_READABLE = "picture not readable"
NO_REGION = "no region found"
FAILED = "failed"

Report = Callable[[int, int], None]  # samples that are done since the last call, and samples of the shard


class State(StrEnum):
    """What became of a shard."""

    DONE = "done already"
    NEW = "annotated"
    REDONE = "annotated again"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """What one shard gave."""

    shard: str
    state: State
    samples: int = 0
    kept: int = 0  # of these, samples that were taken over from the sidecar before
    items: int = 0  # captions or masks
    fallbacks: dict[str, int] = field(default_factory=dict)
    reason: str | None = None  # why it was annotated again, or failed
    damage: str | None = None  # what was wrong with a tar of which a part could be read
    bytes: int = 0


Rows = TypeVar("Rows", TreeRows, RegionRows)
Old = TypeVar("Old", TreeSidecar, RegionSidecar)


class ShardAnnotator(ABC, Generic[Rows, Old]):
    """Annotates shards, one after another, with a model that is loaded once."""

    kind: Kind
    batch: int  # samples at a time

    def __init__(self, annotator: Annotator, sidecars: Path | None):
        self.annotator, self.sidecars = annotator, sidecars

    @abstractmethod
    def read_old(self, path: Path) -> Old:
        """The sidecar that is there."""

    @abstractmethod
    def new_rows(self) -> Rows:
        """No rows yet."""

    @abstractmethod
    def add(self, rows: Rows, tar: int, index: TarIndex, numbers: Sequence[int], old: Old | None) -> int:
        """Append the rows of some samples; gives how many were taken over from `old`."""

    @abstractmethod
    def summarise(self, rows: Rows) -> tuple[int, int, Counter[str]]:
        """Captions or masks, phrases, and fallbacks by reason."""

    def annotate(self, shard: str, report: Report = lambda done, of: None) -> Outcome:
        """Bring the sidecar of a shard up to date. A tar that cannot be read is an outcome, not an exception."""
        path = sidecar_path(shard, self.kind, self.sidecars)
        try:
            mark = fingerprint(shard)
        except OSError as error:
            return Outcome(shard, State.FAILED, reason=_because(error))
        info, reason = self._standing(path, mark)
        if info is not None and reason is None:
            return _done(shard, info, path)
        try:
            with local_copy(shard) as tar:
                return self._annotate(shard, tar, path, mark, info, reason, report)
        except OSError as error:
            return Outcome(shard, State.FAILED, reason=_because(error))

    def _standing(self, path: Path, mark: str) -> tuple[SidecarInfo | None, str | None]:
        """What the sidecar that is there says, when rows of it can be taken over, and why it does not do as it is."""
        if not path.exists():
            return None, None
        try:
            info = read_info(path)
        except SidecarError:
            return None, "sidecar torn or of another format"
        if info.annotator != self.annotator:
            return None, f"made by {info.annotator}"
        return info, None if info.fingerprint == mark else "tar changed"

    def _annotate(
        self,
        shard: str,
        tar: Path,
        path: Path,
        mark: str,
        info: SidecarInfo | None,
        reason: str | None,
        report: Report,
    ) -> Outcome:
        index = make_index(tar)
        if not len(index):
            left_out = ", ".join(f"{count:,} samples with {why}" for why, count in index.info.left_out.items())
            return Outcome(shard, State.FAILED, reason=index.info.damage or left_out or "no samples")
        old = None
        if info is not None:
            try:
                old = self.read_old(path)
            except SidecarError:
                reason = "sidecar torn or of another format"
        rows, kept = self.new_rows(), 0
        file = os.open(tar, os.O_RDONLY)
        try:
            for first in range(0, len(index), self.batch):
                numbers = range(first, min(first + self.batch, len(index)))
                kept += self.add(rows, file, index, numbers, old)
                report(len(numbers), len(index))
        finally:
            os.close(file)
        items, phrases, fallbacks = self.summarise(rows)
        made = SidecarInfo(
            kind=self.kind,
            annotator=self.annotator,
            shard=PurePosixPath(shard).name,
            fingerprint=mark,
            samples=len(index),
            items=items,
            phrases=phrases,
            fallbacks=dict(sorted(fallbacks.items())),
            left_out=dict(sorted(index.info.left_out.items())),
            damage=index.info.damage,
        )
        try:
            size = write_sidecar(path, made, rows)
        except OSError as error:
            raise UserError(f"sidecar {path} cannot be written: {_because(error)}; --sidecars names a folder") from None
        unchanged = kept == len(index) == (len(old) if old is not None else -1)
        state = State.NEW if reason is None else State.DONE if unchanged else State.REDONE
        return Outcome(shard, state, len(index), kept, items, made.fallbacks, reason, made.damage, size)


class TreeAnnotator(ShardAnnotator[TreeRows, TreeSidecar]):
    """Gives every caption its tree."""

    kind = "trees"
    batch = 512

    def __init__(self, parser: Parser, sidecars: Path | None = None):
        super().__init__(Annotator(parser.name, parser.version), sidecars)
        self._parser = parser

    def read_old(self, path: Path) -> TreeSidecar:
        """The trees that are there."""
        return read_trees(path)

    def new_rows(self) -> TreeRows:
        """No rows yet."""
        return TreeRows()

    def add(self, rows: TreeRows, tar: int, index: TarIndex, numbers: Sequence[int], old: TreeSidecar | None) -> int:
        """Parse the captions of some samples, but for those whose trees are known."""
        captions = [sample_captions(tar, index, number) for number in numbers]
        known: dict[tuple[int, str], Parsed] = {}
        if old is not None:
            for number, listed in zip(numbers, captions, strict=True):
                for caption in listed:
                    spans = old.spans(index.keys[number], caption)
                    if not isinstance(spans, Miss):
                        reason = old.fallback(index.keys[number], caption)
                        known[number, caption] = Parsed(spans, reason)  # type: ignore[arg-type]
        wanted = [
            (number, caption)
            for number, listed in zip(numbers, captions, strict=True)
            for caption in listed
            if (number, caption) not in known
        ]
        parsed = self._parser.parse([caption for _, caption in wanted])
        found = known | dict(zip(wanted, parsed, strict=True))
        for number, listed in zip(numbers, captions, strict=True):
            rows.key.append(index.keys[number])
            rows.caption.append([content_hash(caption) for caption in listed])
            rows.spans.append([found[number, caption].spans for caption in listed])
            rows.fallback.append([found[number, caption].fallback for caption in listed])
        if old is None:
            return 0
        fresh = zip(rows.key[-len(numbers) :], rows.caption[-len(numbers) :], strict=True)
        return sum(key in old and old.hashes(key) == hashes for key, hashes in fresh)

    def summarise(self, rows: TreeRows) -> tuple[int, int, Counter[str]]:
        """Captions, their phrases, and flat trees by reason."""
        fallbacks = Counter(reason for sample in rows.fallback for reason in sample if reason is not None)
        phrases = sum(len(caption) for sample in rows.spans for caption in sample)
        return sum(map(len, rows.caption)), phrases, fallbacks


class RegionAnnotator(ShardAnnotator[RegionRows, RegionSidecar]):
    """Gives every picture its masks."""

    kind = "regions"

    def __init__(self, segmenter: Segmenter, sidecars: Path | None = None, batch: int = 8, threads: int = 1):
        super().__init__(Annotator(segmenter.name, segmenter.version, segmenter.options), sidecars)
        self.batch = batch
        self._segmenter, self._pool = segmenter, ThreadPoolExecutor(threads)

    def read_old(self, path: Path) -> RegionSidecar:
        """The masks that are there."""
        return read_regions(path)

    def new_rows(self) -> RegionRows:
        """No rows yet."""
        return RegionRows()

    def add(
        self, rows: RegionRows, tar: int, index: TarIndex, numbers: Sequence[int], old: RegionSidecar | None
    ) -> int:
        """Segment some pictures, but for those whose masks are known."""
        files = [os.pread(tar, extent.size, extent.offset) for extent in map(index.picture, numbers)]
        keys = [index.keys[number] for number in numbers]
        found: dict[int, tuple[list[bytes], str | None]] = {}
        for at, (key, data) in enumerate(zip(keys, files, strict=True)):
            packed = Miss.NO_ROW if old is None else old.packed(key, data)
            if not isinstance(packed, Miss) and old is not None:
                found[at] = packed, old.fallback(key)
        kept = len(found)
        pictures = []
        for at, pixels in self._decoded([at for at in range(len(files)) if at not in found], files):
            if pixels is None:
                found[at] = [], NOT_READABLE
            else:
                pictures.append((at, Picture(keys[at], pixels)))
        masks = self._segment([picture for _, picture in pictures])
        for (at, _), one in zip(pictures, masks, strict=True):
            if one is None or not len(one):
                found[at] = [], FAILED if one is None else NO_REGION
            else:
                found[at] = [pack_mask(mask) for mask in one], None
        for at, (key, data) in enumerate(zip(keys, files, strict=True)):
            rows.key.append(key)
            rows.picture.append(content_hash(data))
            rows.masks.append(found[at][0])
            rows.fallback.append(found[at][1])
        return kept

    def _decoded(
        self, wanted: Sequence[int], files: Sequence[bytes]
    ) -> Iterator[tuple[int, npt.NDArray[np.uint8] | None]]:
        return zip(wanted, self._pool.map(lambda at: decode_picture(files[at]), wanted), strict=True)

    def _segment(self, pictures: Sequence[Picture]) -> list[Masks | None]:
        """The masks of pictures; None for one that the segmenter fails on, unless it fails on all of several."""
        try:
            return [*self._segmenter.segment(pictures)]
        except Exception:
            if len(pictures) == 1:
                return [None]
            alone = [one for picture in pictures for one in self._segment([picture])]
            if all(one is None for one in alone):
                raise
            return alone

    def summarise(self, rows: RegionRows) -> tuple[int, int, Counter[str]]:
        """Masks, nothing, and pictures without masks by reason."""
        return sum(map(len, rows.masks)), 0, Counter(reason for reason in rows.fallback if reason is not None)


def sample_captions(tar: int, index: TarIndex, number: int) -> list[str]:
    """The captions of a sample: those of its first file that has any."""
    for extent, suffix in index.caption_files(number):
        captions = read_captions(os.pread(tar, extent.size, extent.offset), suffix)
        if captions:
            return captions
    return []


def _done(shard: str, info: SidecarInfo, path: Path) -> Outcome:
    size = path.stat().st_size
    return Outcome(
        shard, State.DONE, info.samples, info.samples, info.items, info.fallbacks, damage=info.damage, bytes=size
    )


def _because(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "missing"
    return error.strerror or str(error) or type(error).__name__
