"""One sample, as one epoch shows it: a crop of its image, one of its captions, the parts of both.

Everything random is a function of the seed, the epoch and the sample; neither the process that prepares it nor what was
prepared before matters.
"""

from __future__ import annotations

from dataclasses import dataclass

from powerclip.data.batch import BatchSpec
from powerclip.data.decode import Crop, decode_crop
from powerclip.data.faults import FLAT_TREES, BadSample, Fault, FaultReport
from powerclip.data.keyed_random import Draw, key_of, permutation, uniform
from powerclip.data.shard_order import SampleId
from powerclip.data.shard_reader import NoSidecar, OpenShard, ShardReader
from powerclip.data.sidecar import Miss
from powerclip.data.tokens import CaptionTokenizer, TokenizedCaption
from powerclip.data.trees import Tree, flat_tree, tree_from_spans
from powerclip.errors import UserError


@dataclass(frozen=True)
class Sample:
    """A sample, ready to be put into a batch."""

    key: str
    name: str  # of the sample, for a message
    crop: Crop
    tokens: TokenizedCaption
    tree: Tree
    masks: list[bytes]  # stored masks of the image, in the order in which they are taken
    box_key: int  # of the random boxes that stand for the segments it lacks


class SampleMaker:
    """Prepares samples. What is wrong with one goes into the report that is handed in."""

    def __init__(self, reader: ShardReader, tokenizer: CaptionTokenizer, spec: BatchSpec):
        self.reader, self.tokenizer, self.spec = reader, tokenizer, spec

    def make(self, sample: SampleId, attempt: int, report: FaultReport) -> Sample:
        """The sample of that number; `attempt` is 0 at its own position and counts up where it substitutes another.

        Raises:
            BadSample: it cannot be used.
            UserError: its shard was exchanged for another.
        """
        shard = self.reader.open(sample.shard)
        key = shard.samples.keys[sample.number]
        where = self.name(sample)

        def key_for(purpose: Draw) -> int:
            return key_of(self.spec.augment_seed, sample.epoch, sample.shard, sample.number, attempt, purpose)

        captions = shard.samples.captions(sample.number)
        caption = captions[int(uniform(key_for(Draw.CAPTION), 0) * len(captions))]
        image = shard.samples.image(sample.number)
        crop = decode_crop(image, self.spec.image_size, self.spec.crop, key_for(Draw.CROP))
        for fault in crop.faults:
            report.add(fault, where)
        return Sample(
            key=key,
            name=where,
            crop=crop,
            tokens=self.tokenizer.encode(caption),
            tree=find_tree(shard, key, caption, where, report),
            masks=_masks(shard, key, image, key_for(Draw.MASKS), where, report),
            box_key=key_for(Draw.BOXES),
        )

    def name(self, sample: SampleId) -> str:
        """Which sample that is, for a message."""
        try:
            shard = self.reader.open(sample.shard)
        except BadSample:
            return f"shard {self.reader.path(sample.shard)}"
        return f"{shard.path}, sample {shard.samples.keys[sample.number]}"


def _masks(shard: OpenShard, key: str, image: bytes, draw: int, where: str, report: FaultReport) -> list[bytes]:
    """The stored masks of an image in random order; none where there are none."""
    if shard.regions is None:
        return []
    if isinstance(shard.regions, NoSidecar):
        report.add(shard.regions.fault, where, shard.regions.detail)
        return []
    # A tar that was not touched since holds the images that were annotated.
    packed = shard.regions.packed(key, None if shard.is_as_annotated(shard.regions.info) else image)
    if isinstance(packed, Miss):
        report.add(Fault.REGIONS_NO_ROW if packed is Miss.NO_ROW else Fault.REGIONS_STALE, where, packed)
        return []
    return [packed[number] for number in permutation(draw, len(packed)).tolist()]


def find_tree(shard: OpenShard, key: str, caption: str, where: str, report: FaultReport) -> Tree:
    """The tree of a caption; one phrase, counted, where there is none."""
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
