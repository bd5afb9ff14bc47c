"""The regions of a shard: its images through a segmenter."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from powerclip.annotate.pipeline import ShardAnnotator
from powerclip.annotate.segmenters.base import AsynchronousSegmenter, Masks, Segmenter, SegmenterImage
from powerclip.annotate.sources import OpenSource, Sources
from powerclip.annotate.writer import RegionRows
from powerclip.data.captions import content_hash
from powerclip.data.decode import decode_rgb
from powerclip.data.mask_codec import pack_mask
from powerclip.data.sidecar import Annotator, Miss, RegionSidecar, read_regions

# Why an image has no masks.
NOT_READABLE = "image not readable"
NO_REGION = "no region found"
FAILED = "failed"


@dataclass
class _Batch:
    """Images on their way; what is known of the one at a place in the batch."""

    keys: list[str]
    files: list[bytes]
    results: dict[int, tuple[list[bytes], str | None]] = field(default_factory=dict)  # packed masks, or why none
    kept: int = 0  # known before
    decoding: dict[int, Future[npt.NDArray[np.uint8] | None]] = field(default_factory=dict)
    images: dict[int, SegmenterImage] = field(default_factory=dict)
    masks: Callable[[], Sequence[Masks | None]] = list  # of these images
    packing: dict[int, Future[list[bytes]]] = field(default_factory=dict)


def _pack(masks: Masks) -> list[bytes]:
    return [pack_mask(mask) for mask in masks]


def _append(rows: RegionRows, batch: _Batch) -> None:
    """The rows of a batch."""
    for at, (key, data) in enumerate(zip(batch.keys, batch.files, strict=True)):
        masks, fallback = (batch.packing[at].result(), None) if at in batch.packing else batch.results[at]
        rows.key.append(key)
        rows.image.append(content_hash(data))
        rows.masks.append(masks)
        rows.fallback.append(fallback)


class RegionAnnotator(ShardAnnotator[RegionRows, RegionSidecar]):
    """Gives every image its masks."""

    kind = "regions"

    def __init__(
        self,
        segmenter: Segmenter,
        sidecars: Path | None = None,
        batch: int = 8,
        threads: int = 1,
        sources: Sources | None = None,
    ):
        super().__init__(Annotator(segmenter.name, segmenter.version, segmenter.options), sidecars, sources)
        self.batch = batch
        self._segmenter, self._pool = segmenter, ThreadPoolExecutor(threads)

    def read_old(self, path: Path) -> RegionSidecar:
        """The masks of the existing sidecar."""
        return read_regions(path)

    def new_rows(self) -> RegionRows:
        """No rows yet."""
        return RegionRows()

    def fill(
        self, rows: RegionRows, source: OpenSource, count: int, old: RegionSidecar | None
    ) -> Iterator[tuple[int, int]]:
        """Segment the images, but for those whose masks are known.

        While a batch is with the segmenter, threads decode the next one and pack the masks of the one before.
        """
        stages: list[tuple[deque[_Batch], Callable[[_Batch], None]]] = [
            (deque(), self._start),
            (deque(), self._collect),
            (deque(), partial(_append, rows)),
        ]
        for numbers in [*self.batches(count), *[range(0)] * len(stages)]:
            batch: _Batch | None = self._read(source, numbers, old) if numbers else None
            for waiting, finish in stages:
                if batch is not None:
                    waiting.append(batch)
                # One batch stays in each stage until the next one comes, or none does any more.
                batch = waiting.popleft() if len(waiting) > 1 or (waiting and not numbers) else None
                if batch is not None:
                    finish(batch)
            if batch is not None:
                yield len(batch.keys), batch.kept

    def _read(self, source: OpenSource, numbers: Sequence[int], old: RegionSidecar | None) -> _Batch:
        """Read the files of some images, and begin to decode those whose masks are not known."""
        batch = _Batch(
            [source.samples.keys[number] for number in numbers], [source.image(number) for number in numbers]
        )
        for at, (key, data) in enumerate(zip(batch.keys, batch.files, strict=True)):
            packed = Miss.NO_ROW if old is None else old.packed(key, data)
            if not isinstance(packed, Miss) and old is not None:
                batch.results[at] = packed, old.fallback(key)
            else:
                batch.decoding[at] = self._pool.submit(decode_rgb, data)
        batch.kept = len(batch.results)
        return batch

    def _start(self, batch: _Batch) -> None:
        """Hand the decoded images to the segmenter."""
        for at, decoding in batch.decoding.items():
            pixels = decoding.result()
            if pixels is None:
                batch.results[at] = [], NOT_READABLE
            else:
                batch.images[at] = SegmenterImage(batch.keys[at], pixels)
        images = [*batch.images.values()]
        batch.masks = partial(self._segment, images)
        if images and isinstance(self._segmenter, AsynchronousSegmenter):
            try:
                batch.masks = partial(self._finish, self._segmenter.submit(images), images)
            except Exception:  # one by one, when it is their turn
                return

    def _finish(self, collect: Callable[[], list[Masks]], images: Sequence[SegmenterImage]) -> list[Masks | None]:
        """The masks of images that the segmenter has begun with."""
        try:
            return [*collect()]
        except Exception:
            return self._segment(images)

    def _collect(self, batch: _Batch) -> None:
        """Wait for the masks, and begin to pack them."""
        for at, masks in zip(batch.images, batch.masks(), strict=True):
            if masks is None or not len(masks):
                batch.results[at] = [], FAILED if masks is None else NO_REGION
            else:
                batch.packing[at] = self._pool.submit(_pack, masks)

    def _segment(self, images: Sequence[SegmenterImage]) -> list[Masks | None]:
        """The masks of images; None for one that the segmenter fails on, unless it fails on all of several."""
        try:
            return [*self._segmenter.segment(images)]
        except Exception:
            if len(images) == 1:
                return [None]
            results = [masks for image in images for masks in self._segment([image])]
            if all(masks is None for masks in results):
                raise
            return results

    def summarise(self, rows: RegionRows) -> tuple[int, int, Counter[str]]:
        """Masks, phrases (none), and images without masks by reason."""
        return sum(map(len, rows.masks)), 0, Counter(reason for reason in rows.fallback if reason is not None)
