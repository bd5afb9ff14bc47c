"""Captions to token ids that know their characters, and trees over characters to `Phrases` over tokens.

Axes: C captions · L tokens · P leaves of all captions · T nodes of all captions
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from powerclip.alignment.phrases import Phrases
from powerclip.data.cleaning import align
from powerclip.data.fast_tokens import FastOffsets
from powerclip.data.trees import Tree, is_word
from powerclip.errors import UserError

Nodes = Literal["phrases", "all"]


@dataclass(frozen=True)
class TokenizedCaption:
    """A caption's token ids, start and end tokens included, cut at the context length and not padded."""

    ids: list[int]
    spans: list[tuple[int, int]]  # characters of the raw caption that each token stands for; (x, x) for none
    words: list[bool]  # the tokens that say something: not punctuation, not the start or end token

    def __len__(self) -> int:
        return len(self.ids)


class CaptionTokenizer:
    """An open_clip tokenizer that also says which characters of the raw caption each token came from.

    Examples:
        >>> CaptionTokenizer().encode("A dog.").spans
        [(0, 0), (0, 1), (2, 5), (5, 6), (6, 6)]
    """

    def __init__(self, tokenizer: Any = None, context_length: int | None = None) -> None:
        from open_clip import tokenizer as clip

        self.tokenizer: Any = clip.SimpleTokenizer() if tokenizer is None else tokenizer
        self.context_length: int
        self.pad_id = 0
        self.name = ""  # of a tokenizer that is not CLIP's own
        self._fast: FastOffsets | None = None
        if isinstance(self.tokenizer, clip.HFTokenizer):
            self.context_length = context_length or self.tokenizer.context_length or clip.DEFAULT_CONTEXT_LENGTH
            self._fast = FastOffsets(self.tokenizer, self.context_length)
            self.pad_id, self.name = self._fast.pad_id, self._fast.name
            return
        if not isinstance(self.tokenizer, clip.SimpleTokenizer):
            raise UserError(
                f"phrases need a tokenizer with character offsets, and {type(self.tokenizer).__name__} has none; "
                "use a model with open_clip's own BPE tokenizer (SimpleTokenizer) or a fast one of Hugging Face"
            )
        if self.tokenizer.reduction_fn is not None:
            raise UserError(
                "phrases need every token of a caption, and this tokenizer drops some at random; "
                "leave 'text_mask' / 'reduction_mask' out of its settings"
            )
        self.context_length = context_length or self.tokenizer.context_length or clip.DEFAULT_CONTEXT_LENGTH
        self._lowers = self.tokenizer.clean_fn is clip.get_clean_fn("lower")
        self._pieces: dict[str, _Pieces] = {}

    @property
    def splits_words(self) -> bool:
        """Whether the tokens of a text, in whatever capitals, are those of its words one after the other."""
        return self._fast is None and self._lowers

    def encode(self, caption: str) -> TokenizedCaption:
        """The ids that the open_clip tokenizer gives, with the characters each stands for."""
        if self._fast is not None:
            return TokenizedCaption(*self._fast.encode(caption))
        # Plain text is only lower-cased by open_clip's cleaning, so positions in it are positions in the caption;
        # how it collapses white space does not matter, no token holds any.
        plain = self._lowers and _PLAIN.fullmatch(caption) is not None
        text = caption.lower() if plain else self.tokenizer.clean_fn(caption)
        ids = [self.tokenizer.sot_token_id]
        spans = [(0, 0)]
        words = [False]
        used = 0
        for match in self.tokenizer.pat.finditer(text):
            pieces = self._pieces.get(match[0]) or self._split(match[0])
            at = match.start()
            ids += pieces.ids
            spans += [(at + start, at + end) for start, end in pieces.spans]
            words += pieces.words
            used = match.end()
            if len(ids) >= self.context_length:
                break
        if not plain:
            raw_spans = align(text, caption, used)
            spans[1:] = [(raw_spans[start][0], raw_spans[end - 1][1]) for start, end in spans[1:]]
            words = [word and is_word(caption[start:end]) for word, (start, end) in zip(words, spans, strict=True)]
        kept = self.context_length - 1  # as open_clip cuts: the end token takes the last place
        return TokenizedCaption(
            ids=[*ids[:kept], self.tokenizer.eot_token_id],
            spans=[*spans[:kept], (len(caption), len(caption))],
            words=[*words[:kept], False],
        )

    def pad(self, ids: Sequence[Sequence[int]], full: bool = False, multiple: int = 1) -> Tensor:
        """Ids [C, L], L being the longest caption here, or the context length when `full`.

        `multiple` rounds L up, but not beyond the context length: few different shapes are few to compile for.
        """
        longest = max(map(len, ids), default=0)
        length = self.context_length if full else self.rounded(longest, multiple)
        return torch.tensor([[*row, *[self.pad_id] * (length - len(row))] for row in ids], dtype=torch.long).view(
            len(ids), length
        )

    def rounded(self, length: int, multiple: int) -> int:
        """A length rounded up to a multiple, but not beyond the context length."""
        return max(length, min(-(-length // multiple) * multiple, self.context_length))

    def _split(self, word: str) -> _Pieces:
        """The BPE tokens of one word of cleaned text, cached."""
        coder = self.tokenizer.byte_encoder
        encoded = [char.encode() for char in word]
        owner = [at for at, char in enumerate(encoded) for _ in char]  # byte → character
        symbols = self.tokenizer.bpe("".join(coder[byte] for byte in b"".join(encoded))).split(" ")
        ends = list(accumulate(len(symbol.removesuffix("</w>")) for symbol in symbols))
        spans = [(owner[start], owner[end - 1] + 1) for start, end in zip([0, *ends], ends, strict=False)]
        pieces = _Pieces(
            ids=[self.tokenizer.encoder[symbol] for symbol in symbols],
            spans=spans,
            words=[is_word(word[start:end]) for start, end in spans],
        )
        if len(self._pieces) >= _MOST_REMEMBERED:
            self._pieces.clear()
        self._pieces[word] = pieces
        return pieces


_PLAIN = re.compile(r"[\t\n\r -%'-~]*")  # ASCII without control characters and without &, which begins an HTML entity
_MOST_REMEMBERED = 200_000  # distinct words; web-scale captions have no end of them


@dataclass(frozen=True)
class _Pieces:
    """The BPE tokens of one word, with the characters of the word that each touches."""

    ids: list[int]
    spans: list[tuple[int, int]]
    words: list[bool]


# ---- trees over characters to phrases over tokens --------------------------------------------------------------------


def pack_phrases(
    trees: Sequence[Tree], tokenized: Sequence[TokenizedCaption], length: int, nodes: Nodes = "phrases"
) -> Phrases:
    """The phrases of a batch, for token ids padded to `length`.

    `nodes`: "phrases", the phrase-level constituents; "all" adds the single-word leaves.

    A token that touches two leaves goes to the first. What the cut at the context length removed is dropped: a leaf
    keeps its tokens that are left, nodes that became equal are one. Every caption keeps at least one node; without
    any word it is made of the tokens that there are, or of the end token alone.
    """
    words = torch.zeros(len(trees), length, dtype=torch.bool)
    leaves: list[tuple[int, int]] = []
    ranges: list[tuple[int, int]] = []
    leaf_offsets, node_offsets = [0], [0]
    for row, (tree, tokens) in enumerate(zip(trees, tokenized, strict=True)):
        mapped = _map_tree(tree, tokens, length, nodes)
        words[row, mapped.words] = True
        leaves += mapped.leaves
        ranges += mapped.nodes
        leaf_offsets.append(len(leaves))
        node_offsets.append(len(ranges))
    leaf_ranges = torch.tensor(leaves, dtype=torch.long).view(-1, 2)
    node_ranges = torch.tensor(ranges, dtype=torch.long).view(-1, 2)
    return Phrases(
        words=words,
        leaf_start=leaf_ranges[:, 0].contiguous(),
        leaf_end=leaf_ranges[:, 1].contiguous(),
        leaf_offsets=torch.tensor(leaf_offsets),
        node_start=node_ranges[:, 0].contiguous(),
        node_end=node_ranges[:, 1].contiguous(),
        node_offsets=torch.tensor(node_offsets),
        max_leaves=max((end - start for start, end in pairwise(leaf_offsets)), default=0),
        max_nodes=max((end - start for start, end in pairwise(node_offsets)), default=0),
    )


@dataclass(frozen=True)
class _TokenTree:
    """One caption's tree over its tokens."""

    words: list[int]  # positions of the tokens that belong to a leaf
    leaves: list[tuple[int, int]]  # token ranges
    nodes: list[tuple[int, int]]  # leaf ranges


def _map_tree(tree: Tree, tokens: TokenizedCaption, length: int, nodes: Nodes) -> _TokenTree:
    owners = _owners(tree, tokens, length)
    if not owners:
        words = _tokens_without_words(tokens, length)
        return _TokenTree(words, [(words[0], words[-1] + 1)], [(0, 1)])
    first: dict[int, int] = {}  # leaf of the tree → its first token
    last: dict[int, int] = {}
    for token, leaf in owners.items():
        first.setdefault(leaf, token)
        last[leaf] = token
    kept = list(first)  # the leaves that have a token left, in order
    starts = [start for start, _ in tree.leaves]
    spans = tree.with_words().nodes if nodes == "all" else tree.nodes
    ranges = {  # a dictionary keeps the order and drops repetitions
        (
            bisect_left(kept, bisect_left(starts, span.start)),
            bisect_left(kept, bisect_left(starts, span.end)),
        ): None
        for span in spans
    }
    return _TokenTree(
        list(owners),
        [(first[leaf], last[leaf] + 1) for leaf in kept],
        [(start, end) for start, end in ranges if start < end] or [(0, len(kept))],
    )


def _owners(tree: Tree, tokens: TokenizedCaption, length: int) -> dict[int, int]:
    """Word token → the leaf that it belongs to, the first one that it touches."""
    ends = [end for _, end in tree.leaves]
    owners = {}
    for token, ((start, end), word) in enumerate(zip(tokens.spans[:length], tokens.words, strict=False)):
        if word:
            leaf = bisect_right(ends, start)
            if leaf < len(ends) and tree.leaves[leaf][0] < end:
                owners[token] = leaf
    return owners


def _tokens_without_words(tokens: TokenizedCaption, length: int) -> list[int]:
    """The tokens of a caption without a word: all between start and end token, else the end token."""
    last = min(len(tokens), length) - 1
    return list(range(1, last)) or [last]
