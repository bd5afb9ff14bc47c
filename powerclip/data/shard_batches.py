"""Samples gathered into a batch by a worker, ready to be handed over to the process that trains.

Axes: C pairs (of this rank) · M regions · N patches
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from powerclip.alignment.phrases import Phrases
from powerclip.alignment.regions import boxes_of
from powerclip.data.batch import shorter_captions
from powerclip.data.faults import TOPPED_UP, BadSample, FaultReport
from powerclip.data.keyed_random import uniforms
from powerclip.data.order import StreamOrder
from powerclip.data.samples import Sample, SampleMaker
from powerclip.data.tokens import Nodes, pack_phrases
from powerclip.errors import UserError

_MOST_ATTEMPTS = 100  # stand-ins in a row; with a tenth of all samples bad, the third is already one in a thousand


@dataclass(frozen=True)
class RawBatch:
    """A batch as a worker hands it over: pixels still bytes, a quarter of what they become."""

    images: Tensor  # [C, H, W, 3] uint8
    tokens: Tensor  # [C, L] long
    regions: Tensor  # [C, M, N] bool
    phrases: Phrases
    keys: list[str]
    report: FaultReport
    short: int = 0  # as in `Batch`
    lengths: tuple[int, ...] = ()  # likewise

    def pin_memory(self) -> RawBatch:
        """The same in memory that a GPU can read while it computes."""
        return replace(
            self,
            images=self.images.pin_memory(),
            tokens=self.tokens.pin_memory(),
            regions=self.regions.pin_memory(),
            phrases=self.phrases.map(Tensor.pin_memory),
        )


class BatchMaker:
    """Makes the batches of one rank by their number; lives in every worker."""

    def __init__(
        self,
        order: StreamOrder,
        samples: SampleMaker,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        nodes: Nodes,
        largest_box: float,
        segments: bool,
        length_multiple: int,
        sort: bool,
    ):
        self.order, self.samples = order, samples
        self.batch_size, self.share = batch_size, batch_size // world_size
        self.first = rank * self.share
        self.nodes, self.largest_box = nodes, largest_box
        self.segments, self.length_multiple, self.sort = segments, length_multiple, sort

    def __getitem__(self, step: int) -> RawBatch:
        """The batch that the update after `step` finished ones sees."""
        batch = range(step * self.batch_size, (step + 1) * self.batch_size)
        report = FaultReport()
        samples = [self._sample(position, batch, report) for position in batch[self.first : self.first + self.share]]
        if self.sort:
            samples.sort(key=lambda sample: len(sample.tokens.ids))
        captions = [sample.tokens for sample in samples]
        rows, multiple = [caption.ids for caption in captions], self.length_multiple
        tokens = self.samples.tokenizer.pad(rows, multiple=multiple)
        longest = len(rows[shorter_captions(len(rows)) - 1])
        return RawBatch(
            images=self._images(samples),
            tokens=tokens,
            regions=self._regions(samples, report),
            phrases=pack_phrases([sample.tree for sample in samples], captions, tokens.shape[1], self.nodes),
            keys=[sample.key for sample in samples],
            report=report,
            short=min(-(-longest // multiple) * multiple, tokens.shape[1]) if self.sort else 0,
            lengths=tuple(map(len, rows)),
        )

    def _sample(self, position: int, batch: range, report: FaultReport) -> Sample:
        place = self.order.place(position)
        for attempt in range(_MOST_ATTEMPTS):
            if attempt:
                place = self.order.spare(position, attempt, batch)
            try:
                return self.samples.make(place, attempt, report)
            except BadSample as bad:
                where, detail = self.samples.name(place), bad.detail
                report.add(bad.fault, where, detail)
                report.bad.append(place)
        raise UserError(f"{_MOST_ATTEMPTS} samples in a row cannot be used, the last being {where}: {detail}")

    def _images(self, samples: Sequence[Sample]) -> Tensor:
        images = _shared_bytes((len(samples), *self.samples.look.image_size, 3))
        for image, sample in zip(images, samples, strict=True):
            image.copy_(sample.crop.pixels)
        return images

    def _regions(self, samples: Sequence[Sample], report: FaultReport) -> Tensor:
        """Segments, and random boxes for those that are missing: the first ones drawn, so that each has its own."""
        look = self.samples.look
        keys = np.array([sample.box_key for sample in samples], np.uint64)
        draws = uniforms(keys, 4 * look.regions).reshape(len(samples), 4, look.regions).transpose(1, 0, 2)
        regions = boxes_of(torch.from_numpy(draws), look.grid, self.largest_box)
        if self.segments:
            for row, sample in zip(regions, samples, strict=True):
                row[: len(sample.segments)] = torch.from_numpy(sample.segments)
            missing = sum(look.regions - len(sample.segments) for sample in samples)
            report.counts.update({TOPPED_UP: missing} if missing else {})
        return regions


def _shared_bytes(shape: tuple[int, ...]) -> Tensor:
    """Room for bytes; in a worker, memory that the main process sees too: nothing is copied to hand it over."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    # As torch's own collation does it.
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
