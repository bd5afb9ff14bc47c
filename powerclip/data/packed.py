"""A corpus ready to be batched: images on the device, captions as tokens, trees as phrases.

Axes: L tokens of the longest caption · P leaves of all captions · T nodes of all captions
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.phrases import Phrases
from powerclip.data.corpus import Corpus
from powerclip.data.tokens import CaptionTokenizer, Nodes, pack_phrases


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
    )


def take_tokens(tokens: Tensor, chosen: Tensor, length: int) -> Tensor:
    """The rows of chosen captions, cut or padded with 0 to `length`."""
    rows = tokens[chosen, :length]
    return F.pad(rows, (0, length - rows.shape[1]))


def take_phrases(phrases: Phrases, chosen: Tensor, length: int) -> Phrases:
    """The trees of chosen captions, for token rows cut or padded to `length` (which holds all of each caption)."""
    leaf, leaf_offsets = _ragged_take(phrases.leaf_offsets, chosen)
    node, node_offsets = _ragged_take(phrases.node_offsets, chosen)
    words = phrases.words[chosen, :length]
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


def _ragged_take(offsets: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Members of the chosen groups, end to end, and the offsets of these groups."""
    lengths = offsets.diff()[chosen]
    ends = F.pad(lengths.cumsum(0), (1, 0))
    members = torch.arange(int(ends[-1])) + torch.repeat_interleave(offsets[chosen] - ends[:-1], lengths)
    return members, ends
