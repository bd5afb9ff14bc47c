"""Batches of a corpus in memory, on any device: shuffling, cropping and packing, a function of seed and step.

Axes: C pairs · L tokens · M regions · N patches · P leaves of all captions · T nodes of all captions
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.phrases import Phrases
from powerclip.alignment.regions import random_boxes
from powerclip.data.batch import Batch
from powerclip.data.corpus import Corpus
from powerclip.data.loader import CLIP_MEAN, CLIP_STD, BatchLoader, mix
from powerclip.data.tokens import CaptionTokenizer, Nodes, pack_phrases


class CorpusLoader(BatchLoader):
    """Epochs over a corpus: every picture once an epoch, a caption of its own at random, a random crop.

    Args:
        corpus: what to show.
        tokenizer: gives the tokens of a caption and their place in it.
        image_size: height and width of the crops, in pixels.
        grid: rows and columns of patches.
        batch_size: C; the last pictures of an epoch's order that do not fill a batch are left out of it.
        crop: smallest share of the picture's area that a crop keeps; 1 shows whole pictures.
        device: where pictures are kept and cropped.
        Others as in `SceneLoader`.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        tokenizer: CaptionTokenizer,
        image_size: tuple[int, int],
        grid: tuple[int, int],
        batch_size: int,
        regions: int = 10,
        nodes: Nodes = "phrases",
        crop: float = 0.9,
        seed: int = 0,
        region_seed: int = 0,
        workers: int = 0,
        device: torch.device | str = "cpu",
        mean: Sequence[float] = CLIP_MEAN,
        std: Sequence[float] = CLIP_STD,
    ):
        super().__init__(workers)
        if batch_size > len(corpus.keys):
            raise ValueError(
                f"train.batch_size {batch_size} is more than the {len(corpus.keys)} pictures of the corpus"
            )
        self.device = torch.device(device)
        self.image_size, self.grid, self.batch_size = image_size, grid, batch_size
        self.regions, self.crop = regions, crop
        self.seed, self.region_seed = seed, region_seed
        self.keys = corpus.keys
        self.images = corpus.images.to(self.device)
        self._mean = torch.tensor(mean, device=self.device).view(3, 1, 1) * 255
        self._std = torch.tensor(std, device=self.device).view(3, 1, 1) * 255
        tokenized = [tokenizer.encode(caption) for caption in corpus.captions]
        self._lengths = torch.tensor([len(caption) for caption in tokenized])
        self._tokens = tokenizer.pad([caption.ids for caption in tokenized])  # [captions, L]
        self._phrases = pack_phrases(corpus.trees, tokenized, self._tokens.shape[1], nodes)
        counts = torch.bincount(corpus.image_of_caption, minlength=len(corpus.keys))
        self._caption_counts, self._first_caption = counts, counts.cumsum(0) - counts

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass over the corpus."""
        return len(self.keys) // self.batch_size

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""
        epoch, place = divmod(step, self.steps_per_epoch)
        shuffle = torch.Generator().manual_seed(mix(self.seed, epoch))
        order = torch.randperm(len(self.keys), generator=shuffle)
        chosen = order[place * self.batch_size : (place + 1) * self.batch_size]
        generator = torch.Generator().manual_seed(mix(self.region_seed, step))
        draw = torch.rand(self.batch_size, generator=generator)
        caption = self._first_caption[chosen] + (draw * self._caption_counts[chosen]).long()
        boxes = random_crops(self.batch_size, self.crop, generator)
        regions = random_boxes(self.batch_size, self.regions, self.grid, generator)
        # A multiple of 8 tokens: few different shapes to compile for, and well-shaped matrices.
        length = min(-(-int(self._lengths[caption].max()) // 8) * 8, self._tokens.shape[1])
        return Batch(
            images=self.crop_images(chosen, boxes),
            tokens=self._send(self._tokens[caption, :length]),
            regions=self._send(regions),
            phrases=take(self._phrases, caption, length).to(self.device, non_blocking=True),
            keys=[self.keys[i] for i in chosen.tolist()],
        )

    def crop_images(self, chosen: Tensor, boxes: Tensor) -> Tensor:
        """Crops [C, 3, H, W] of the pictures of those numbers, normalised; boxes as `random_crops` gives them."""
        pictures = self.images[self._send(chosen)].float()
        centre, half = self._send(boxes[:, :2]), self._send(boxes[:, 2:])
        theta = torch.zeros(len(boxes), 2, 3, device=self.device)
        theta[:, 0, 0], theta[:, 1, 1] = half[:, 0], half[:, 1]
        theta[:, :, 2] = centre
        where = F.affine_grid(theta, [len(boxes), 3, *self.image_size], align_corners=False)
        crops = F.grid_sample(pictures, where, mode="bicubic", padding_mode="reflection", align_corners=False)
        return (crops.clamp_(0, 255) - self._mean) / self._std

    def _send(self, values: Tensor) -> Tensor:
        return values.to(self.device, non_blocking=True)


def random_crops(count: int, smallest: float, generator: torch.Generator) -> Tensor:
    """Random crop boxes [C, 4] of at least a share of the area: centre x and y, half width and height, in [-1, 1].

    Area and aspect ratio (3/4 to 4/3, its logarithm uniform) as in RandomResizedCrop; a side longer than the picture is
    cut to it.
    """
    area, ratio, x, y = torch.rand(4, count, generator=generator)
    area = smallest + (1 - smallest) * area
    aspect = (ratio * 2 - 1).mul(torch.tensor(4 / 3).log()).exp()
    half = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], 1).clamp(max=1)
    centre = (torch.stack([x, y], 1) * 2 - 1) * (1 - half)
    return torch.cat([centre, half], 1)


def take(phrases: Phrases, chosen: Tensor, length: int) -> Phrases:
    """The trees of chosen captions, for token rows cut to `length` (at least as long as the chosen captions)."""
    leaf, leaf_offsets = _ragged_take(phrases.leaf_offsets, chosen)
    node, node_offsets = _ragged_take(phrases.node_offsets, chosen)
    return Phrases(
        words=phrases.words[chosen, :length],
        leaf_start=phrases.leaf_start[leaf],
        leaf_end=phrases.leaf_end[leaf],
        leaf_offsets=leaf_offsets,
        node_start=phrases.node_start[node],
        node_end=phrases.node_end[node],
        node_offsets=node_offsets,
        max_leaves=int(leaf_offsets.diff().max()),
    )


def _ragged_take(offsets: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Members of the chosen groups, end to end, and the offsets of these groups."""
    lengths = offsets.diff()[chosen]
    ends = F.pad(lengths.cumsum(0), (1, 0))
    members = torch.arange(int(ends[-1])) + torch.repeat_interleave(offsets[chosen] - ends[:-1], lengths)
    return members, ends
