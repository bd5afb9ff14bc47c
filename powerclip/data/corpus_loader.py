"""Batches of a corpus in memory, on any device: shuffling, cropping and packing, a function of the seeds and the step.

Axes: C pairs · M regions · N patches · L tokens of the longest caption · K masks of an image
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.phrases import Phrases
from powerclip.alignment.regions import regions_of
from powerclip.data.batch import Batch, BatchSpec, shorter_captions
from powerclip.data.corpus import Corpus
from powerclip.data.crops import crop_boxes
from powerclip.data.keyed_random import Draw, Keys, key_of, keys_of, permutation, uniforms
from powerclip.data.loader import BatchLoader, box_draws
from powerclip.data.masks import CorpusMasks
from powerclip.data.pixels import Normaliser, crop_batch
from powerclip.data.tokens import CaptionTokenizer, Nodes, pack_phrases
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks


class CorpusLoader(BatchLoader):
    """Epochs over a corpus: every image once an epoch, a caption of its own at random, a random crop.

    The images at the end of an epoch's order that do not fill a batch are left out of the epoch.

    Args:
        corpus: what to show, see `pack_corpus`; images may lie on another device than batches.
        spec: the batches.
        masks: stored masks to take regions from; what is missing to M, or all of them without, are random boxes.
        ranks: share each batch.
    """

    # What stands for the pixels of the corpus's images, for towers whose first blocks are frozen: `train.precompute`.
    tokens: Tensor | None = None  # [images, 1+N, D]

    def __init__(self, corpus: PackedCorpus, spec: BatchSpec, masks: CorpusMasks | None = None, ranks: Ranks = SINGLE):
        super().__init__(spec, ranks)
        if spec.batch_size > len(corpus.keys):
            raise UserError(f"train.batch_size is {spec.batch_size}, but the corpus has only {len(corpus.keys)} images")
        self.corpus = corpus
        self.masks = None if masks is None else masks.to(spec.device)
        self._mask_counts = None if masks is None else masks.counts.cpu()
        self._normalise = Normaliser(spec.mean, spec.std, spec.device)
        self._order = lru_cache(2)(self._make_order)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in one pass over the corpus."""
        return len(self.corpus.keys) // self.spec.batch_size

    def batch(self, step: int) -> Batch:
        """The batch that the update after `step` finished ones sees."""
        corpus, spec = self.corpus, self.spec
        epoch, number = divmod(step, self.steps_per_epoch)
        images = self._order(epoch)[number * spec.batch_size : (number + 1) * spec.batch_size][self._rows]

        def keys(purpose: Draw) -> Keys:
            return keys_of(spec.augment_seed, epoch, images.numpy(), purpose)

        draws = torch.from_numpy(uniforms(keys(Draw.CAPTION), 1)[:, 0])
        captions = corpus.first_caption[images] + (draws * corpus.caption_counts[images]).long()
        lengths, short = corpus.lengths[captions], 0
        if spec.sort_by_length:
            lengths, by_length = lengths.sort(stable=True)
            images, captions = images[by_length], captions[by_length]
            short = self._padded(lengths[shorter_captions(len(lengths)) - 1])
        length = self._padded(lengths.max())
        crops = self._send(torch.from_numpy(crop_boxes(uniforms(keys(Draw.CROP), 4), spec.crop)))
        draws = self._send(box_draws(keys(Draw.BOXES), spec.regions))
        regions = regions_of(draws, spec.grid, spec.drawn, spec.largest_box)
        sent = self._send(images)
        if self.masks is not None and self._mask_counts is not None:
            mask_draws = torch.from_numpy(uniforms(keys(Draw.MASKS), int(self._mask_counts[images].max())))
            regions = self.masks.choose(sent, crops, self._send(mask_draws), regions, spec.grid)
        return Batch(
            images=self.crop_images(sent, crops) if self.tokens is None else self.tokens[sent],
            tokens=self._send(take_tokens(corpus.tokens, captions, length, corpus.pad_id)),
            regions=regions,
            phrases=take_phrases(corpus.phrases, captions, length).map(self._send),
            keys=[corpus.keys[image] for image in images.tolist()],
            short=short,
            lengths=tuple(lengths.tolist()),
        )

    def crop_images(self, images: Tensor, crops: Tensor) -> Tensor:
        """Crops [C, 3, H, W] of the images of those numbers, normalised; the boxes as `crop_boxes` gives them."""
        pixels = self.corpus.images[images.to(self.corpus.images.device)].to(self.spec.device)
        return self._normalise(crop_batch(pixels, crops, self.spec.image_size))

    def _make_order(self, epoch: int) -> Tensor:
        return torch.from_numpy(permutation(key_of(self.spec.seed, epoch), len(self.corpus.keys)))

    def _padded(self, length: Tensor) -> int:
        multiple = self.spec.length_multiple
        return min(-(-int(length) // multiple) * multiple, self.corpus.context_length)

    def _send(self, values: Tensor) -> Tensor:
        """On the device. A GPU reads pinned memory while it computes; with other memory the host would wait for it."""
        pinned = values.pin_memory() if self.spec.device.type == "cuda" else values
        return pinned.to(self.spec.device, non_blocking=True)


# ---- packing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedCorpus:
    """Everything that a batch of a corpus is cut from. Only the images lie on the device. Runs share it."""

    keys: list[str]
    images: Tensor  # [images, 3, size, size] uint8
    tokens: Tensor  # [captions, L]
    lengths: Tensor  # [captions] tokens of each
    phrases: Phrases  # of all captions
    first_caption: Tensor  # [images] number of the first caption of each image
    caption_counts: Tensor  # [images]
    context_length: int
    pad_id: int = 0


def pack_corpus(
    corpus: Corpus,
    tokenizer: CaptionTokenizer,
    nodes: Nodes = "phrases",
    device: torch.device | str = "cpu",
) -> PackedCorpus:
    """Tokenise a corpus and bring its images to the device."""
    tokenized = [tokenizer.encode(caption) for caption in corpus.captions]
    tokens = tokenizer.pad([caption.ids for caption in tokenized])
    counts = torch.bincount(corpus.image_of_caption, minlength=len(corpus.keys))
    return PackedCorpus(
        keys=corpus.keys,
        images=corpus.images.to(device),
        tokens=tokens,
        lengths=torch.tensor([len(caption) for caption in tokenized]),
        phrases=pack_phrases(corpus.trees, tokenized, tokens.shape[1], nodes),
        first_caption=counts.cumsum(0) - counts,
        caption_counts=counts,
        context_length=tokenizer.context_length,
        pad_id=tokenizer.pad_id,
    )


def take_tokens(tokens: Tensor, captions: Tensor, length: int, pad_id: int = 0) -> Tensor:
    """The rows of some captions, cut or padded to `length`."""
    rows = tokens[captions, :length]
    return F.pad(rows, (0, length - rows.shape[1]), value=pad_id)


def take_phrases(phrases: Phrases, captions: Tensor, length: int) -> Phrases:
    """The trees of some captions, for token rows cut or padded to `length` (which holds all of each caption)."""
    leaf, leaf_offsets = _ragged_take(phrases.leaf_offsets, captions)
    node, node_offsets = _ragged_take(phrases.node_offsets, captions)
    words = phrases.words[captions, :length]
    return Phrases(
        words=F.pad(words, (0, length - words.shape[1])),
        leaf_start=phrases.leaf_start[leaf],
        leaf_end=phrases.leaf_end[leaf],
        leaf_offsets=leaf_offsets,
        node_start=phrases.node_start[node],
        node_end=phrases.node_end[node],
        node_offsets=node_offsets,
        max_leaves=int(leaf_offsets.diff().max()),
        max_nodes=int(node_offsets.diff().max()),
    )


def _ragged_take(offsets: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Members of some groups, end to end, and the offsets of these groups."""
    lengths = offsets.diff()[groups]
    ends = F.pad(lengths.cumsum(0), (1, 0))
    members = torch.arange(int(ends[-1])) + torch.repeat_interleave(offsets[groups] - ends[:-1], lengths)
    return members, ends
