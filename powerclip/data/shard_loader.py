"""Batches from shards and their sidecars, made by worker processes: a function of the seeds and the step.

Batch b holds positions b·C … (b+1)·C-1 of the endless stream of epochs (`StreamOrder`), and rank r of n its r-th part
of them. So all samples of an epoch are shown once, a batch may hold the end of one epoch and the beginning of the next,
and neither the number of workers nor the number of ranks changes what is in it.

Where a sample is bad another of its window stands in, never one of the same batch, chosen by the position alone. It is
then shown twice in that epoch; all good samples are still shown at least once, and batches keep their size.

Axes: C pairs
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from powerclip.data.batch import Batch
from powerclip.data.faults import FaultWatch
from powerclip.data.loader import WORKER_KILLED, BatchLoader
from powerclip.data.order import StreamOrder
from powerclip.data.pixels import CLIP_MEAN, CLIP_STD, Normaliser
from powerclip.data.samples import Look, SampleMaker
from powerclip.data.shard_batches import BatchMaker, RawBatch
from powerclip.data.shard_reader import ShardReader
from powerclip.data.shards import ShardSet
from powerclip.data.tokens import CaptionTokenizer, Nodes
from powerclip.errors import UserError

_PREFETCHED = 2  # batches that each worker makes ahead


class ShardLoader(BatchLoader):
    """Batches of a corpus that does not fit into memory, as a training run reads them.

    Args:
        shards: the tars, see `open_shards`.
        tokenizer: gives the tokens of a caption and their place in it.
        image_size: height and width of the crops, in pixels.
        grid: rows and columns of patches.
        batch_size: pairs of all ranks together.
        sidecars: where the sidecars lie, when not beside the tars.
        trees: read the trees of captions; without, every caption is one phrase.
        segments: regions are stored masks, topped up with random boxes; without, random boxes.
        regions: M, regions of each image.
        largest_box: longest side of a random box, as a share of the image's.
        nodes: which constituents of the trees take part.
        crop: smallest share of an image's area that a crop keeps.
        seed: in which order samples are shown.
        region_seed: which captions, crops and regions.
        window: how many shards are shuffled together.
        workers: processes that make batches ahead; 0 makes each when it is needed.
        device: where batches are wanted.
        length_multiple: token rows are padded to a multiple of it: few different shapes to compile for.
        sort: order the pairs of a batch by the length of their captions, so that short ones need little padding.
        mean, std: what the image tower wants its pixels normalised with.
        rank, world_size: which part of each batch this process gets.
        strict: any fault of a sample is an error.
        max_bad: largest share of a shard's samples that may be unusable.
        warn: is told each kind of fault once.
    """

    def __init__(
        self,
        shards: ShardSet,
        *,
        tokenizer: CaptionTokenizer,
        image_size: tuple[int, int],
        grid: tuple[int, int],
        batch_size: int,
        sidecars: Path | None = None,
        trees: bool = True,
        segments: bool = False,
        regions: int = 10,
        largest_box: float = 1.0,
        nodes: Nodes = "phrases",
        crop: float = 0.9,
        seed: int = 0,
        region_seed: int = 0,
        window: int = 8,
        workers: int = 0,
        device: torch.device | str = "cpu",
        length_multiple: int = 1,
        sort: bool = False,
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
        rank: int = 0,
        world_size: int = 1,
        strict: bool = False,
        max_bad: float = 1.0,
        warn: Callable[[str], None] | None = None,
    ):
        super().__init__(workers)
        if batch_size > shards.samples:
            raise UserError(f"train.batch_size is {batch_size}, but the shards have only {shards.samples:,} samples")
        if batch_size % world_size:
            raise UserError(f"train.batch_size is {batch_size}, which {world_size} ranks cannot share evenly")
        self.shards, self.batch_size = shards, batch_size
        self.device = torch.device(device)
        # Two windows meet in a batch.
        reader = ShardReader(shards, sidecars, trees=trees, regions=segments, keep=2 * window)
        look = Look(image_size, grid, crop, regions, region_seed)
        self.maker = BatchMaker(
            StreamOrder(shards.counts, seed, window),
            SampleMaker(reader, tokenizer, look),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            nodes=nodes,
            largest_box=largest_box,
            segments=segments,
            length_multiple=length_multiple,
            sort=sort,
        )
        self._watch = FaultWatch(
            shards.counts,
            [str(path) for path in shards.paths],
            strict=strict,
            max_bad=max_bad,
            world_size=world_size,
            warn=warn,
        )
        self._normalise = Normaliser(mean, std, self.device)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the shards; what is left of it begins the next batch."""
        return self.shards.samples // self.batch_size

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees, made in this process.

        Raises:
            UserError: a fault, when strict; or too many bad samples.
        """
        return self._finish(self.maker[step])

    def stream(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Batches `start` … `stop`-1 in order. Nothing before `start` is read."""
        if self.workers == 0:
            yield from map(self.batch, range(start, stop))
        else:
            yield from map(self._finish, self.raw_stream(start, stop))

    def raw_stream(self, start: int, stop: int) -> Generator[RawBatch, None, None]:
        """What the workers hand over, before it is looked at and brought to the device."""
        made: DataLoader[RawBatch | UserError] = DataLoader(
            _Careful(self.maker),  # type: ignore[arg-type]
            sampler=range(start, stop),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=_PREFETCHED if self.workers else None,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_begin_worker,
        )
        batches = iter(made)
        while True:
            try:
                raw = next(batches, None)
            except (ConnectionError, EOFError):  # in the middle of a message
                raise UserError(WORKER_KILLED) from None
            if isinstance(raw, UserError):
                raise raw
            if raw is None:
                return
            yield raw

    def _finish(self, raw: RawBatch) -> Batch:
        """Look at the faults, bring the batch to the device and normalise its pixels there."""
        self._watch.see(raw.report)
        return Batch(
            images=self._pixels(raw.images),
            tokens=raw.tokens.to(self.device, non_blocking=True),
            regions=raw.regions.to(self.device, non_blocking=True),
            phrases=raw.phrases.to(self.device, non_blocking=True),
            keys=raw.keys,
            counts=raw.report.counts,
            short=raw.short,
            lengths=raw.lengths,
        )

    def _pixels(self, images: Tensor) -> Tensor:
        """[C, 3, H, W] float of [C, H, W, 3] bytes."""
        planes = images.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        pixels = torch.empty(planes.shape, device=self.device)
        if self.device.type == "cuda":
            return self._normalise(pixels.copy_(planes))
        # One image fits into the cache of a core; a batch would be fetched from memory three times.
        for target, source in zip(pixels, planes, strict=True):
            self._normalise(target.copy_(source))
        return pixels


class _Careful:
    """Hands a `UserError` over instead of raising it: torch would wrap it into a traceback."""

    def __init__(self, maker: BatchMaker):
        self._maker = maker

    def __getitem__(self, step: int) -> RawBatch | UserError:
        try:
            return self._maker[step]
        except UserError as error:
            return error


def _begin_worker(_: int) -> None:
    """Workers end with the process that they work for, not before: it may want to finish a step and save it."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(name, signal.SIG_IGN)
    # Of odd images Pillow warns in every worker; what matters about them is counted.
    warnings.filterwarnings("ignore", module="PIL")
