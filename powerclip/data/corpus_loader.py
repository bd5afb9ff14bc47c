"""Batches of a corpus in memory, on any device: shuffling, cropping and packing, a function of the seeds and the step.

Axes: C pairs · M regions · N patches
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from powerclip.alignment.regions import boxes_of, draw_boxes
from powerclip.data.batch import Batch, shorter_captions
from powerclip.data.corpus import Corpus
from powerclip.data.corpus_masks import CorpusMasks
from powerclip.data.loader import BatchLoader, mix, share_of
from powerclip.data.packed import PackedCorpus, pack_corpus, take_phrases, take_tokens
from powerclip.data.pixels import CLIP_MEAN, CLIP_STD, Normaliser
from powerclip.data.resample import crop_batch
from powerclip.data.tokens import CaptionTokenizer, Nodes
from powerclip.errors import UserError


class CorpusLoader(BatchLoader):
    """Epochs over a corpus: every image once an epoch, a caption of its own at random, a random crop.

    Args:
        corpus: what to show; one that is not packed yet is packed here, with `tokenizer` and `nodes`.
        image_size: height and width of the crops, in pixels.
        grid: rows and columns of patches.
        batch_size: C, of all ranks together; the images at the end of an epoch's order that do not fill a batch are
            left out of the epoch.
        regions: M, of each image.
        masks: stored masks to take regions from; what is missing to M, or all of them without, are random boxes.
        largest_box: longest side of a box, as a share of the image's.
        crop: smallest share of the image's area that a crop keeps; 1 shows whole images.
        seed: in which order images are shown.
        region_seed: which captions, crops, boxes and masks.
        workers: threads that make batches ahead; 0 makes each when it is needed.
        rank, world_size: which of how many equal shares of each batch to make.
        device: where images are kept and cropped.
        length_multiple: token rows are padded to a multiple of it: few different shapes to compile for, and well-shaped
            matrices.
        sort: order the pairs of a batch by the length of their captions, so that short ones need little padding.
        mean, std: what the image tower wants its pixels normalised with.
        tokenizer, nodes: for a corpus that is not packed yet.
    """

    def __init__(
        self,
        corpus: Corpus | PackedCorpus,
        *,
        image_size: tuple[int, int],
        grid: tuple[int, int],
        batch_size: int,
        regions: int = 10,
        masks: CorpusMasks | None = None,
        largest_box: float = 1.0,
        crop: float = 0.9,
        seed: int = 0,
        region_seed: int = 0,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        length_multiple: int = 16,
        sort: bool = False,
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
        tokenizer: CaptionTokenizer | None = None,
        nodes: Nodes = "phrases",
    ):
        super().__init__(workers)
        if batch_size > len(corpus.keys):
            raise UserError(f"train.batch_size is {batch_size}, but the corpus has only {len(corpus.keys)} images")
        self.device = torch.device(device)
        if isinstance(corpus, Corpus):
            corpus = pack_corpus(corpus, tokenizer or CaptionTokenizer(), nodes, self.device)
        self.corpus = corpus
        self.masks = None if masks is None else masks.to(self.device)
        self._mask_counts = None if masks is None else masks.counts.cpu()
        self.image_size, self.grid, self.batch_size = image_size, grid, batch_size
        self.regions, self.largest_box = regions, largest_box
        self.crop, self.length_multiple, self.sort = crop, length_multiple, sort
        self.seed, self.region_seed = seed, region_seed
        self._own = share_of(batch_size, rank, world_size)
        self._normalise = Normaliser(mean, std, self.device)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass over the corpus."""
        return len(self.corpus.keys) // self.batch_size

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""
        corpus = self.corpus
        epoch, place = divmod(step, self.steps_per_epoch)
        order = torch.randperm(len(corpus.keys), generator=torch.Generator().manual_seed(mix(self.seed, epoch)))
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size][self._own]
        # The boxes come after captions and crops, and masks after the boxes: settings that differ in regions alone see
        # the same of all else. All are drawn for all ranks: an image has the same ones on any number of them.
        generator = torch.Generator().manual_seed(mix(self.region_seed, step))
        draw = torch.rand(self.batch_size, generator=generator)[self._own]
        caption = corpus.first_caption[chosen] + (draw * corpus.caption_counts[chosen]).long()
        crops = random_crops(self.batch_size, self.crop, generator)[self._own]
        box_draws = draw_boxes(self.batch_size, self.regions, generator)[:, self._own]
        mask_draws = self._draw_masks(chosen, generator)
        lengths, short = corpus.lengths[caption], 0
        if self.sort:
            lengths, by_length = lengths.sort(stable=True)
            chosen, caption, crops = chosen[by_length], caption[by_length], crops[by_length]
            box_draws, mask_draws = box_draws[:, by_length], mask_draws[by_length]
            short = self._padded(lengths[shorter_captions(len(lengths)) - 1])
        length = self._padded(lengths.max())
        keys = [corpus.keys[i] for i in chosen.tolist()]
        chosen, crops = self._send(chosen), self._send(crops)
        regions = boxes_of(self._send(box_draws), self.grid, self.largest_box)
        if self.masks is not None:
            regions = self.masks.choose(chosen, crops, self._send(mask_draws), regions, self.grid)
        return Batch(
            images=self.crop_images(chosen, crops),
            tokens=self._send(take_tokens(corpus.tokens, caption, length)),
            regions=regions,
            phrases=take_phrases(corpus.phrases, caption, length).map(self._send),
            keys=keys,
            short=short,
            lengths=tuple(lengths.tolist()),
        )

    def _draw_masks(self, chosen: Tensor, generator: torch.Generator) -> Tensor:
        """A random number for each mask of each image [C, K]; drawn for all ranks, whose K may differ."""
        if self.masks is None or self._mask_counts is None:
            return torch.zeros(len(chosen), 0)
        draws = torch.rand(self.batch_size, self.masks.most, generator=generator)[self._own]
        return draws[:, : int(self._mask_counts[chosen].max())]

    def _padded(self, length: Tensor) -> int:
        return min(-(-int(length) // self.length_multiple) * self.length_multiple, self.corpus.context_length)

    def crop_images(self, chosen: Tensor, crops: Tensor) -> Tensor:
        """Crops [C, 3, H, W] of the images of those numbers, normalised; the boxes as `random_crops` gives them."""
        pictures = self.corpus.images[chosen.to(self.corpus.images.device)].to(self.device)
        return self._normalise(crop_batch(pictures, crops, self.image_size))

    def _send(self, values: Tensor) -> Tensor:
        """On the device. A GPU reads pinned memory while it computes; with other memory the host would wait for it."""
        pinned = values.pin_memory() if self.device.type == "cuda" else values
        return pinned.to(self.device, non_blocking=True)


def random_crops(count: int, smallest: float, generator: torch.Generator) -> Tensor:
    """Random crop boxes [C, 4] inside an image: centre x and y, half width and height, the image being [-1, 1]².

    The area is uniform between `smallest` and the whole; the aspect ratio's logarithm uniform up to 4/3 either way, as
    far as a crop of that area fits into the image. RandomResizedCrop draws until one fits.
    """
    area, ratio, x, y = torch.rand(4, count, generator=generator)
    area = smallest + (1 - smallest) * area
    widest = torch.clamp(-area.log(), max=math.log(4 / 3))
    aspect = ((ratio * 2 - 1) * widest).exp()
    half = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], 1).clamp(max=1)  # 1.0000001 by rounding
    centre = (torch.stack([x, y], 1) * 2 - 1) * (1 - half)
    return torch.cat([centre, half], 1)
