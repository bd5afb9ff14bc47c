"""Batches from shards and their sidecars, made by worker processes: a function of the seeds and the step.

Batch b holds positions b·C … (b+1)·C-1 of the endless stream of epochs (`StreamOrder`), and rank r of n its r-th part
of them. So all samples of an epoch are shown once, a batch may hold the end of one epoch and the beginning of the next,
and neither the number of workers nor the number of ranks changes what is in it.

A bad sample is replaced by another of its window, never by one of the same batch, chosen by the position alone. It
is then shown twice in the epoch; all good samples are still shown at least once, and batches keep their size.

Axes: C pairs
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from powerclip.data.batch import Batch, BatchSpec
from powerclip.data.faults import FaultWatch
from powerclip.data.loader import WORKER_KILLED, BatchLoader, begin_worker
from powerclip.data.pixels import Normaliser
from powerclip.data.remote_shards import RemoteShards
from powerclip.data.shard_batches import BatchMaker, RawBatch
from powerclip.data.shard_order import StreamOrder
from powerclip.data.shard_reader import ShardReader
from powerclip.data.shard_samples import SampleMaker
from powerclip.data.shards import ShardSet
from powerclip.data.tokens import CaptionTokenizer
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks

_PREFETCHED = 2  # batches that each worker makes ahead


@dataclass(frozen=True)
class ShardOptions:
    """What a loader of shards reads beside images and captions, and which faults it tolerates."""

    sidecars: Path | None = None  # where the sidecars lie; None: beside the tars
    tree_folder: Path | None = None  # where those of trees lie, when not with the others
    trees: bool = True  # read the trees of captions; without, every caption is one phrase
    segments: bool = False  # regions are stored masks, topped up with random boxes; without, random boxes
    window: int = 8  # how many shards are shuffled together
    strict: bool = False  # any fault of a sample is an error
    max_bad: float = 1.0  # largest share of a shard's samples that may be unusable


class ShardLoader(BatchLoader):
    """Batches of a corpus that does not fit into memory, as a training run reads them.

    Args:
        shards: the tars, see `open_shards`.
        spec: the batches.
        tokenizer: gives the tokens of a caption and their place in it.
        options: annotations, order and faults.
        ranks: share each batch.
        warn: called once for each kind of fault.
    """

    def __init__(
        self,
        shards: ShardSet,
        spec: BatchSpec,
        tokenizer: CaptionTokenizer,
        options: ShardOptions | None = None,
        ranks: Ranks = SINGLE,
        warn: Callable[[str], None] | None = None,
    ):
        super().__init__(spec, ranks)
        options = options or ShardOptions()
        if spec.batch_size > shards.samples:
            raise UserError(
                f"train.batch_size is {spec.batch_size}, but the shards have only {shards.samples:,} samples"
            )
        self.shards, self.options = shards, options
        # A batch may hold samples of two windows.
        keep = 2 * options.window
        reader = ShardReader(
            shards,
            options.sidecars,
            tree_folder=options.tree_folder,
            trees=options.trees,
            regions=options.segments,
            keep=keep,
        )
        self.maker = BatchMaker(
            StreamOrder(shards.counts, spec.seed, options.window),
            SampleMaker(reader, tokenizer, spec),
            self._rows,
            segments=options.segments,
        )
        self._watch = FaultWatch(
            shards.counts,
            [str(path) for path in shards.paths],
            strict=options.strict,
            max_bad=options.max_bad,
            world_size=ranks.count,
            warn=warn,
        )
        self._normalise = Normaliser(spec.mean, spec.std, spec.device)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the shards; what is left of it begins the next batch."""
        return self.shards.samples // self.spec.batch_size

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees, made in this process.

        Raises:
            UserError: a fault, when strict; or too many bad samples.
        """
        return self._finish(self.maker[step])

    def stream(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches `start` … `stop`-1 in order. Nothing before `start` is read."""
        if self.spec.workers == 0:
            with self._fetching(start, stop) as reached:
                for step in range(start, stop):
                    yield self.batch(step)
                    reached(step + 1)
        else:
            yield from map(self._finish, self.raw_stream(start, stop))

    def raw_stream(self, start: int, stop: int) -> Generator[RawBatch, None, None]:
        """What the workers hand over, before faults are checked and it is moved to the device."""
        loader: DataLoader[RawBatch | UserError] = DataLoader(
            _ReturnsErrors(self.maker),  # type: ignore[arg-type]
            sampler=range(start, stop),
            batch_size=None,
            num_workers=self.spec.workers,
            prefetch_factor=_PREFETCHED if self.spec.workers else None,
            pin_memory=self.spec.device.type == "cuda",
            worker_init_fn=begin_worker,
        )
        batches = iter(loader)
        # The workers are there: a thread that fetches must not be, when they are forked.
        with self._fetching(start, stop) as reached:
            for step in count(start):
                try:
                    raw = next(batches, None)
                except (ConnectionError, EOFError):  # in the middle of a message
                    raise UserError(WORKER_KILLED) from None
                if isinstance(raw, UserError):
                    raise raw
                if raw is None:
                    return
                yield raw
                reached(step + 1)

    @contextmanager
    def _fetching(self, start: int, stop: int) -> Iterator[Callable[[int], None]]:
        """Fetch remote shards ahead, as far as steps are reached; local ones need nothing."""
        if not isinstance(self.shards, RemoteShards):
            yield lambda step: None
            return
        size = self.spec.batch_size
        with self.shards.ahead(self.maker.order, start * size, stop * size) as prefetch:
            yield lambda step: prefetch.reached(step * size)

    def _finish(self, raw: RawBatch) -> Batch:
        """Check the faults, move the batch to the device and normalise its pixels there."""
        self._watch.check(raw.report)
        return Batch(
            images=self._pixels(raw.images),
            tokens=raw.tokens.to(self.spec.device, non_blocking=True),
            regions=raw.regions.to(self.spec.device, non_blocking=True),
            phrases=raw.phrases.to(self.spec.device, non_blocking=True),
            keys=raw.keys,
            counts=raw.report.counts,
            short=raw.short,
            lengths=raw.lengths,
        )

    def _pixels(self, images: Tensor) -> Tensor:
        """[C, 3, H, W] float of [C, H, W, 3] bytes."""
        planes = images.to(self.spec.device, non_blocking=True).permute(0, 3, 1, 2)
        pixels = torch.empty(planes.shape, device=self.spec.device)
        if self.spec.device.type == "cuda":
            return self._normalise(pixels.copy_(planes))
        # One image fits into the cache of a core; a batch would be fetched from memory three times.
        for target, source in zip(pixels, planes, strict=True):
            self._normalise(target.copy_(source))
        return pixels


class _ReturnsErrors:
    """Hands a `UserError` over instead of raising it: torch would wrap it into a traceback."""

    def __init__(self, maker: BatchMaker):
        self._maker = maker

    def __getitem__(self, step: int) -> RawBatch | UserError:
        try:
            return self._maker[step]
        except UserError as error:
            return error
