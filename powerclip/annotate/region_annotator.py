"""The regions of a shard: its images through a segmenter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from powerclip.annotate.pipeline import ShardAnnotator
from powerclip.annotate.segmenters.base import Masks, Segmenter, SegmenterImage
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

    def add(self, rows: RegionRows, source: OpenSource, numbers: Sequence[int], old: RegionSidecar | None) -> int:
        """Segment some images, but for those whose masks are known."""
        files = [source.image(number) for number in numbers]
        keys = [source.samples.keys[number] for number in numbers]
        results: dict[int, tuple[list[bytes], str | None]] = {}
        for at, (key, data) in enumerate(zip(keys, files, strict=True)):
            packed = Miss.NO_ROW if old is None else old.packed(key, data)
            if not isinstance(packed, Miss) and old is not None:
                results[at] = packed, old.fallback(key)
        kept = len(results)
        images = []
        for at, pixels in self._decoded([at for at in range(len(files)) if at not in results], files):
            if pixels is None:
                results[at] = [], NOT_READABLE
            else:
                images.append((at, SegmenterImage(keys[at], pixels)))
        masks = self._segment([image for _, image in images])
        for (at, _), image_masks in zip(images, masks, strict=True):
            if image_masks is None or not len(image_masks):
                results[at] = [], FAILED if image_masks is None else NO_REGION
            else:
                results[at] = [pack_mask(mask) for mask in image_masks], None
        for at, (key, data) in enumerate(zip(keys, files, strict=True)):
            rows.key.append(key)
            rows.image.append(content_hash(data))
            rows.masks.append(results[at][0])
            rows.fallback.append(results[at][1])
        return kept

    def _decoded(
        self, wanted: Sequence[int], files: Sequence[bytes]
    ) -> Iterator[tuple[int, npt.NDArray[np.uint8] | None]]:
        return zip(wanted, self._pool.map(lambda at: decode_rgb(files[at]), wanted), strict=True)

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
