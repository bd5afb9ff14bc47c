"""Captions of scenes as tokens and phrases, a whole batch at once.

They are what `CaptionTokenizer.encode` and `pack_phrases` give, ten times faster: the words of scenes are few, so each
is tokenised once, and a scene knows its phrases as ranges of words, so no text is read again.

Axes: C captions · L tokens · W words of all captions, marks among them · R those that are no mark · T nodes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from powerclip.alignment.phrases import Phrases
from powerclip.data.tokens import CaptionTokenizer, Nodes, pack_phrases

if TYPE_CHECKING:
    from powerclip.data.scenes import Scene

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedCaptions:
    """The captions of a batch."""

    tokens: Tensor  # [C, L]
    lengths: tuple[int, ...]  # tokens of each
    phrases: Phrases


class SceneCaptions:
    """Packs captions of scenes; remembers the tokens of each word.

    Args:
        tokenizer: gives the tokens.
        nodes: which constituents of the trees take part.
        multiple: L is rounded up to a multiple of it.
    """

    def __init__(self, tokenizer: CaptionTokenizer, nodes: Nodes = "phrases", multiple: int = 1) -> None:
        self._tokenizer, self._nodes, self._multiple = tokenizer, nodes, multiple
        self._words = _Words(tokenizer)

    def pack(self, scenes: Sequence[Scene]) -> PackedCaptions:
        """The captions of one or more scenes."""
        if self._tokenizer.splits_words:
            packed = self._pack_words(scenes)
            if packed is not None:
                return packed
        return self._pack_texts(scenes)

    def _pack_texts(self, scenes: Sequence[Scene]) -> PackedCaptions:
        """From their texts and trees, as any captions: also those that the context length cuts."""
        captions = [self._tokenizer.encode(scene.caption) for scene in scenes]
        tokens = self._tokenizer.pad([caption.ids for caption in captions], multiple=self._multiple)
        phrases = pack_phrases([scene.tree for scene in scenes], captions, tokens.shape[1], self._nodes)
        return PackedCaptions(tokens, tuple(map(len, captions)), phrases)

    def _pack_words(self, scenes: Sequence[Scene]) -> PackedCaptions | None:
        """From their words; None where a caption is longer than the context length."""
        words: list[str] = []
        ranges: list[tuple[int, int]] = []  # the phrases, as ranges of all words
        starts = [0]
        for scene in scenes:
            scene.add_outline(words, ranges)
            starts.append(len(words))
        numbers = np.array([self._words[word] for word in words])
        start = np.array(starts)  # [C+1] of each caption's words
        caption = np.repeat(np.arange(len(scenes)), np.diff(start))  # [W]
        ids, counts, is_real = self._words.arrays()
        taken = counts[numbers]  # [W] tokens of each word
        before = _before(taken)  # [W+1] tokens of all words before it
        lengths = np.diff(before[start]) + 2  # the start and the end token are no word's
        if lengths.max() > self._tokenizer.context_length:
            return None
        position = 1 + before[:-1] - before[start[caption]]  # [W] of a word's first token in its row
        real = is_real[numbers]

        length = self._tokenizer.rounded(int(lengths.max()), self._multiple)
        tokens = np.full((len(scenes), length), self._tokenizer.pad_id)
        tokens[:, 0] = self._tokenizer.tokenizer.sot_token_id
        tokens[np.arange(len(scenes)), lengths - 1] = self._tokenizer.tokenizer.eot_token_id
        mask = np.zeros(tokens.shape, bool)
        for number in range(ids.shape[1]):  # the first tokens of all words, the second ones of those that have two, …
            has = taken > number
            tokens[caption[has], position[has] + number] = ids[numbers[has], number]
            mask[caption[has], position[has] + number] = real[has]

        tree = _outline_trees(np.array(ranges).reshape(-1, 2), start, real, all_nodes=self._nodes == "all")
        word = np.flatnonzero(real)  # [R]
        last = word[tree.leaf_last]
        phrases = Phrases(
            words=torch.from_numpy(mask),
            leaf_start=torch.from_numpy(position[word[tree.leaf_first]]),
            leaf_end=torch.from_numpy(position[last] + taken[last]),
            leaf_offsets=torch.from_numpy(tree.leaf_offsets),
            node_start=torch.from_numpy(tree.node_start),
            node_end=torch.from_numpy(tree.node_end),
            node_offsets=torch.from_numpy(tree.node_offsets),
            max_leaves=int(np.diff(tree.leaf_offsets).max()),
            max_nodes=int(np.diff(tree.node_offsets).max()),
        )
        return PackedCaptions(torch.from_numpy(tokens), tuple(lengths.tolist()), phrases)


@dataclass(frozen=True)
class _Trees:
    """Trees of captions, their leaves counted among all captions' words that are no mark."""

    leaf_first: Numbers  # first word of each leaf
    leaf_last: Numbers  # its last word
    leaf_offsets: Numbers  # [C+1]
    node_start: Numbers  # [T] first leaf of each node, counted within its caption
    node_end: Numbers  # [T] one past its last leaf
    node_offsets: Numbers  # [C+1]


def _outline_trees(ranges: Numbers, start: Numbers, real: npt.NDArray[np.bool_], *, all_nodes: bool) -> _Trees:
    """The trees of phrases given as ranges of words [., 2], by the rules of `powerclip.data.trees`.

    Args:
        ranges: the phrases of all captions.
        start: of each caption's words [C+1].
        real: which words are no marks [W].
        all_nodes: whether words that are leaves are nodes too.
    """
    rank = _before(real)  # [W+1] words that are no mark before each
    total = int(rank[-1])
    bounds = rank[start]
    roots = np.stack([bounds[:-1], bounds[1:]], 1)
    # Pre-order: by the start, and of those that start together the longer first; each range once.
    first, end = _preorder(np.concatenate([rank[ranges], roots]), total)
    is_lowest = np.append(first[1:], total) >= end  # a phrase inside would come next
    depth = np.zeros(total + 1, np.int64)
    np.add.at(depth, first[is_lowest] + 1, 1)
    np.add.at(depth, end[is_lowest], -1)
    begins = depth.cumsum()[:total] == 0  # a leaf: a lowest phrase, or a word outside of them
    leaf = _before(begins)  # [R+1]
    leaf_first = np.flatnonzero(begins)
    leaf_last = np.append(leaf_first[1:], total) - 1
    if all_nodes:
        leaves = np.stack([leaf_first, leaf_last + 1], 1)
        first, end = _preorder(np.concatenate([np.stack([first, end], 1), leaves]), total)
    leaf_offsets = leaf[bounds]
    owner = np.searchsorted(bounds, first, side="right") - 1  # the caption of each node
    return _Trees(
        leaf_first,
        leaf_last,
        leaf_offsets,
        leaf[first] - leaf_offsets[owner],
        leaf[end] - leaf_offsets[owner],
        _before(np.bincount(owner, minlength=len(bounds) - 1)),
    )


def _preorder(ranges: Numbers, total: int) -> tuple[Numbers, Numbers]:
    """First words and ends of ranges [., 2], each once and not empty, the outer before the inner."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    keys = np.unique(ranges[:, 0] * (total + 1) + total - ranges[:, 1])
    return keys // (total + 1), total - keys % (total + 1)


def _before(counts: npt.NDArray[np.generic]) -> Numbers:
    """Sums of all that come before: [n+1]."""
    return np.concatenate([[0], counts.cumsum(dtype=np.int64)])


class _Words(dict[str, int]):
    """Word → its number, given when it is first asked for."""

    def __init__(self, tokenizer: CaptionTokenizer) -> None:
        self._tokenizer = tokenizer
        self._rows: list[tuple[list[int], bool]] = []
        self._arrays: tuple[Numbers, Numbers, npt.NDArray[np.bool_]] | None = None

    def __missing__(self, word: str) -> int:
        encoded = self._tokenizer.encode(word)
        self._rows.append((encoded.ids[1:-1], any(encoded.words)))
        self._arrays = None
        self[word] = len(self)
        return self[word]

    def arrays(self) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
        """The tokens of each word [words, most], how many it has, and whether it is no mark."""
        if self._arrays is None:
            counts = np.array([len(ids) for ids, _ in self._rows])
            padded = [[*ids, *[0] * (int(counts.max()) - len(ids))] for ids, _ in self._rows]
            self._arrays = np.array(padded), counts, np.array([is_word for _, is_word in self._rows])
        return self._arrays
