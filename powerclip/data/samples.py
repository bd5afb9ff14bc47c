"""One sample, as one epoch shows it: a crop of its image, one of its captions, the parts of both.

Everything random is a function of the seed, the epoch and the sample; neither the process that prepares it nor what was
prepared before matters.

Axes: M regions · N patches
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from powerclip.data.captions import read_captions
from powerclip.data.decode import Crop, decode_crop
from powerclip.data.faults import FLAT_TREES, BadSample, Fault, FaultReport
from powerclip.data.keyed_random import key_of, uniform
from powerclip.data.masks import choose_regions
from powerclip.data.order import Place
from powerclip.data.shard_reader import NoSidecar, OpenShard, ShardReader
from powerclip.data.sidecar import Miss
from powerclip.data.tokens import CaptionTokenizer, TokenizedCaption
from powerclip.data.trees import Tree, flat_tree, tree_from_spans
from powerclip.errors import UserError

_CAPTION, _CROP, _MASKS, _BOXES = range(4)  # what a key is for: to draw more of one does not change another


@dataclass(frozen=True)
class Look:
    """How samples are shown."""

    image_size: tuple[int, int]  # height and width in pixels
    grid: tuple[int, int]  # rows and columns of patches
    crop: float  # smallest share of an image's area that a crop keeps
    regions: int  # M
    seed: int  # of captions, crops and regions


@dataclass(frozen=True)
class Sample:
    """A sample, ready to be put into a batch."""

    key: str
    crop: Crop
    tokens: TokenizedCaption
    tree: Tree
    segments: npt.NDArray[np.bool_]  # [≤ M, N]
    box_key: int  # of the random boxes that stand for the segments it lacks


class SampleMaker:
    """Prepares samples. What is wrong with one goes into the report that is handed in."""

    def __init__(self, reader: ShardReader, tokenizer: CaptionTokenizer, look: Look):
        self.reader, self.tokenizer, self.look = reader, tokenizer, look

    def make(self, place: Place, attempt: int, report: FaultReport) -> Sample:
        """The sample at a place; `attempt` tells its turn as a stand-in for another from its own.

        Raises:
            BadSample: it cannot be used.
            UserError: its shard was exchanged for another.
        """
        shard = self.reader.open(place.shard)
        key = shard.index.keys[place.number]
        where = self.name(place)

        def draw(purpose: int) -> int:
            return key_of(self.look.seed, place.epoch, place.shard, place.number, attempt, purpose)

        captions = _captions(shard, place.number)
        caption = captions[int(uniform(draw(_CAPTION), 0) * len(captions))]
        image = shard.read(shard.index.image(place.number))
        crop = decode_crop(image, self.look.image_size, self.look.crop, draw(_CROP))
        for fault in crop.faults:
            report.add(fault, where)
        return Sample(
            key=key,
            crop=crop,
            tokens=self.tokenizer.encode(caption),
            tree=_tree(shard, key, caption, where, report),
            segments=self._segments(shard, key, image, crop, draw(_MASKS), where, report),
            box_key=draw(_BOXES),
        )

    def name(self, place: Place) -> str:
        """Which sample that is, for a message."""
        try:
            shard = self.reader.open(place.shard)
        except BadSample:
            return f"shard {self.reader.path(place.shard)}"
        return f"{shard.path}, sample {shard.index.keys[place.number]}"

    def _segments(
        self, shard: OpenShard, key: str, image: bytes, crop: Crop, draw: int, where: str, report: FaultReport
    ) -> npt.NDArray[np.bool_]:
        """The patches of stored masks; fewer than M, or none, where there are no more."""
        none = np.zeros((0, self.look.grid[0] * self.look.grid[1]), np.bool_)
        if shard.regions is None:
            return none
        if isinstance(shard.regions, NoSidecar):
            report.add(shard.regions.fault, where, shard.regions.detail)
            return none
        # A tar that was not touched since holds the images that were annotated.
        packed = shard.regions.packed(key, None if shard.is_as_annotated(shard.regions.info) else image)
        if isinstance(packed, Miss):
            report.add(Fault.REGIONS_NO_ROW if packed is Miss.NO_ROW else Fault.REGIONS_STALE, where, packed)
            return none
        try:
            return choose_regions(packed, self.look.regions, crop.box, self.look.grid, draw)
        except ValueError as error:
            report.add(Fault.REGIONS_BROKEN, where, str(error))
            return none


def _captions(shard: OpenShard, number: int) -> list[str]:
    """The captions of a sample: those of its first file that has one.

    Raises:
        BadSample: there is none, or none that is text.
    """
    binary = False
    for extent, suffix in shard.index.caption_files(number):
        data = shard.read(extent)
        captions = [caption for caption in read_captions(data, suffix) if _is_text(caption)] if _decodes(data) else []
        if captions:
            return captions
        binary = binary or not _decodes(data)
    if binary:
        raise BadSample(Fault.BINARY_CAPTION, "its caption is not text")
    raise BadSample(Fault.NO_CAPTION, "its caption is blank")


def _decodes(data: bytes) -> bool:
    try:
        return "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False


def _is_text(caption: str) -> bool:
    """A JSON string may hold half of a character, which no tokenizer can read."""
    try:
        caption.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _tree(shard: OpenShard, key: str, caption: str, where: str, report: FaultReport) -> Tree:
    if shard.trees is None:
        return flat_tree(caption)
    if isinstance(shard.trees, NoSidecar):
        report.add(shard.trees.fault, where, shard.trees.detail)
    else:
        spans = shard.trees.spans(key, caption)
        if isinstance(spans, Miss):
            report.add(Fault.TREES_NO_ROW if spans is Miss.NO_ROW else Fault.TREES_STALE, where, spans)
        elif not shard.trees.fallback(key, caption):
            try:
                return tree_from_spans(spans, caption)
            except UserError as error:
                report.add(Fault.TREES_BROKEN, where, str(error))
    report.counts[FLAT_TREES] += 1
    return flat_tree(caption)
