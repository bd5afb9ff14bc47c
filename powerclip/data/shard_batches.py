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
from powerclip.alignment.regions import regions_of
from powerclip.data.batch import shorter_captions
from powerclip.data.faults import TOPPED_UP, BadSample, Fault, FaultReport
from powerclip.data.loader import box_draws
from powerclip.data.masks import choose_regions
from powerclip.data.shard_order import StreamOrder
from powerclip.data.shard_samples import Sample, SampleMaker
from powerclip.data.tokens import pack_phrases
from powerclip.errors import UserError

_MOST_ATTEMPTS = 100  # substitutes in a row; with a tenth of all samples bad, the third is already one in a thousand


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
    """Makes the batches of one rank by their number; lives in every worker.

    Args:
        order: of the samples.
        samples: makes each.
        rows: of a batch, those of this rank.
        segments: whether regions are stored masks, and what is missing is counted.
    """

    def __init__(self, order: StreamOrder, samples: SampleMaker, rows: slice, *, segments: bool):
        self.order, self.samples, self.spec = order, samples, samples.spec
        self.rows, self.segments = rows, segments

    def __getitem__(self, step: int) -> RawBatch:
        """The batch that the update after `step` finished ones sees."""
        spec = self.spec
        batch = range(step * spec.batch_size, (step + 1) * spec.batch_size)
        report = FaultReport()
        samples = [self._sample(position, batch, report) for position in batch[self.rows]]
        if spec.sort_by_length:
            samples.sort(key=lambda sample: len(sample.tokens.ids))
        captions = [sample.tokens for sample in samples]
        rows, multiple = [caption.ids for caption in captions], spec.length_multiple
        tokens = self.samples.tokenizer.pad(rows, multiple=multiple)
        longest = len(rows[shorter_captions(len(rows)) - 1])
        return RawBatch(
            images=self._images(samples),
            tokens=tokens,
            regions=self._regions(samples, report),
            phrases=pack_phrases([sample.tree for sample in samples], captions, tokens.shape[1], spec.nodes),
            keys=[sample.key for sample in samples],
            report=report,
            short=min(-(-longest // multiple) * multiple, tokens.shape[1]) if spec.sort_by_length else 0,
            lengths=tuple(map(len, rows)),
        )

    def _sample(self, position: int, batch: range, report: FaultReport) -> Sample:
        sample = self.order.sample_at(position)
        for attempt in range(_MOST_ATTEMPTS):
            if attempt:
                sample = self.order.substitute(position, attempt, batch)
            try:
                return self.samples.make(sample, attempt, report)
            except BadSample as bad:
                where, detail = self.samples.name(sample), bad.detail
                report.add(bad.fault, where, detail)
                report.bad.append(sample)
        raise UserError(f"{_MOST_ATTEMPTS} samples in a row cannot be used, the last being {where}: {detail}")

    def _images(self, samples: Sequence[Sample]) -> Tensor:
        images = _shared_bytes((len(samples), *self.spec.image_size, 3))
        for image, sample in zip(images, samples, strict=True):
            image.copy_(sample.crop.pixels)
        return images

    def _regions(self, samples: Sequence[Sample], report: FaultReport) -> Tensor:
        """Segments, and random boxes for those that are missing: the first ones drawn, so that each has its own."""
        spec = self.spec
        keys = np.array([sample.box_key for sample in samples], np.uint64)
        regions = regions_of(box_draws(keys, spec.regions), spec.grid, spec.drawn, spec.largest_box)
        if self.segments:
            crops = torch.tensor([sample.crop.box for sample in samples], dtype=torch.float64)
            segments = choose_regions([sample.masks for sample in samples], crops, spec.regions, spec.grid)
            missing = spec.regions * len(samples)
            for row, sample, masks in zip(regions, samples, segments, strict=True):
                if masks is None:
                    report.add(Fault.REGIONS_BROKEN, sample.name, "a stored mask cannot be read")
                else:
                    row[: len(masks)] = masks
                    missing -= len(masks)
            report.counts.update({TOPPED_UP: missing} if missing else {})
        return regions


def _shared_bytes(shape: tuple[int, ...]) -> Tensor:
    """An empty tensor of bytes, in a worker in shared memory: nothing is copied to hand it over."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    # As torch's own collation does it.
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
