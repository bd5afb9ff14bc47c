"""Texts for mosaics in which a phrase's place and its neighbours tell nothing about where it is in the image.

*mixed*: a caption some of whose phrases are exchanged for phrases of the other captions of its mosaic. Each of them
must find the tile that it came from, whatever stands around it: its words may not carry the rest of the sentence.
*alone*: one phrase of each caption as a text of its own, with its own end of text.
*both*: each caption gives one or the other, at random.

A phrase is a lowest one here ("a dog"), a leaf of the tree that is a node too.

Axes: c captions of this rank · E texts · K leaves of a text · L tokens
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from powerclip.alignment.phrases import Phrases
from powerclip.data.batch import Batch, FurtherTexts
from powerclip.objectives.mosaics import TILES, in_mosaics

MIXED_LEAVES, MIXED_TOKENS = 16, 32  # most of a mixed caption: what is beyond them is left out
ALONE_TOKENS = 16


def draws_of_a_text(kind: str) -> tuple[int, ...]:
    """The shape of the uniform numbers that a text of each kind needs."""
    return (1,) if kind == "alone" else (MIXED_LEAVES + 1, 3)


def further_texts(batch: Batch, share: float, kind: str, exchanged: float, draws: Tensor) -> FurtherTexts:
    """A text of that kind for each caption of a batch that is in a mosaic, from uniform numbers [c, …]."""
    phrases = batch.phrases
    count = phrases.leaf_offsets.diff()
    position = torch.arange(phrases.max_leaves, device=count.device)
    is_phrase = (position < count.unsqueeze(1)) & phrase_leaves(phrases)
    numbers = in_mosaics(torch.arange(len(batch), device=count.device), share)  # [G, 4] captions
    draws, rows = in_mosaics(draws, share).flatten(0, 1), numbers.flatten()
    alone = torch.full_like(rows, kind == "alone", dtype=torch.bool)
    # A caption without a lowest phrase gives its first leaf.
    single = pick(is_phrase[rows], draws if kind == "alone" else draws[:, -1:, 1])
    caption, leaf, real = rows[:, None], single, torch.ones_like(single, dtype=torch.bool)
    if kind != "alone":
        if kind == "both":
            alone = draws[:, -1, 0] < 0.5
        is_first = torch.arange(MIXED_LEAVES, device=rows.device) == 0
        mixed_caption, mixed_leaf, mixed_real = mix(numbers, count, is_phrase, exchanged, draws[:, :-1])
        caption = torch.where(alone[:, None], caption, mixed_caption)
        leaf = torch.where(alone[:, None], leaf, mixed_leaf)
        real = torch.where(alone[:, None], is_first, mixed_real)
    tile = torch.zeros_like(count).scatter(0, rows, torch.arange(len(rows), device=rows.device))
    asked = real & (alone[:, None] | is_phrase[caption, leaf])
    length = ALONE_TOKENS if kind == "alone" else MIXED_TOKENS
    texts = assemble(batch.tokens, phrases, caption, leaf, real, asked, tile[caption], length)
    return replace(texts, alone=alone)


def phrase_leaves(phrases: Phrases) -> Tensor:
    """Which leaves of each caption are nodes too [c, max_leaves] bool."""
    single = phrases.node_end - phrases.node_start == 1
    found = torch.zeros(len(phrases), phrases.max_leaves + 1, dtype=torch.bool, device=single.device)
    # Other nodes go to a column that is cut off.
    found[phrases.node_segments.index, torch.where(single, phrases.node_start, phrases.max_leaves)] = True
    return found[:, :-1]


def pick(allowed: Tensor, draws: Tensor) -> Tensor:
    """One of the allowed entries of each row [rows, n] bool for each uniform number [rows, k]: their indices [rows, k].

    Where none is allowed, entry 0.
    """
    order = allowed.int().argsort(dim=1, descending=True, stable=True)
    return order.gather(1, (draws * allowed.sum(1, keepdim=True)).long().clamp(max=allowed.shape[1] - 1))


def mix(
    numbers: Tensor, count: Tensor, is_phrase: Tensor, exchanged: float, draws: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The captions and the leaves [E, K] that make up each mixed caption, and which of the K there are.

    Args:
        numbers: the captions of each mosaic [G, 4].
        count: leaves of each caption [c].
        is_phrase: which leaves are phrases [c, max_leaves].
        exchanged: share of the phrases that are exchanged.
        draws: uniform numbers [E, K, 3]: whether, from which caption, which of its phrases.
    """
    rows = numbers.flatten()
    leaf = torch.arange(draws.shape[1], device=rows.device).expand(len(rows), -1)
    real = leaf < count[rows, None]
    leaf = leaf.clamp(max=is_phrase.shape[1] - 1)
    place = torch.arange(TILES, device=rows.device).repeat(len(numbers))[:, None]
    other = (place + 1 + (draws[..., 1] * (TILES - 1)).long().clamp(max=TILES - 2)) % TILES
    other = numbers.repeat_interleave(TILES, 0).gather(1, other)  # [E, K] captions
    wanted = is_phrase[rows].gather(1, leaf) & (draws[..., 0] < exchanged) & is_phrase.any(1)[other]
    of_other = pick(is_phrase[other].flatten(0, 1), draws[..., 2].flatten()[:, None]).view_as(leaf)
    return torch.where(wanted, other, rows[:, None]), torch.where(wanted, of_other, leaf), real


def assemble(
    tokens: Tensor,
    phrases: Phrases,
    caption: Tensor,
    leaf: Tensor,
    real: Tensor,
    asked: Tensor,
    tile: Tensor,
    length: int,
) -> FurtherTexts:
    """Texts of some leaves of some captions, one after the other between start and end of text.

    Args:
        tokens: of the captions [c, L].
        phrases: their trees.
        caption: where each leaf comes from [E, K].
        leaf: its number there [E, K].
        real: which of the K there are, the first ones.
        asked: which of them shall find their tile.
        tile: the tile that each belongs to [E, K].
        length: most tokens; leaves that do not fit are left out.
    """
    number = (phrases.leaf_offsets[caption] + leaf).clamp(max=len(phrases.leaf_start) - 1)
    start = phrases.leaf_start[number]
    sizes = (phrases.leaf_end[number] - start).where(real, 0)
    finish = 1 + sizes.cumsum(1)
    real = real & (finish < length)  # the end of text needs a place
    sizes = sizes.where(real, 0)
    finish, begin = finish.where(real, 0), (finish - sizes).where(real, 0)
    end = 1 + sizes.sum(1, keepdim=True)
    position = torch.arange(length, device=tokens.device).expand(len(caption), -1)
    # The leaf that a position lies in: as many as end before it or there.
    at = ((finish.unsqueeze(1) <= position.unsqueeze(2)) & real.unsqueeze(1)).sum(2).clamp(max=caption.shape[1] - 1)
    source = (start.gather(1, at) + position - begin.gather(1, at)).clamp(0, tokens.shape[1] - 1)
    row = caption.gather(1, at)
    inside = (position >= 1) & (position < end)
    own = tokens[caption[:, 0]]
    # The end of text is the last token that is no padding; a token within the text may have its id, 0, too.
    at_end = torch.where(own != 0, torch.arange(own.shape[1], device=own.device), 0).amax(1, keepdim=True)
    ends = own.gather(1, at_end)
    text = torch.where(inside, tokens[row, source], 0)
    text = torch.where(position == end, ends, text)
    text[:, 0] = tokens[caption[:, 0], 0]
    count = caption.shape[1]
    offsets = torch.arange(0, count * (len(caption) + 1), count, device=tokens.device)
    made = Phrases(
        words=phrases.words[row, source] & inside,
        leaf_start=begin.flatten(),
        leaf_end=finish.flatten(),
        leaf_offsets=offsets,
        node_start=leaf.new_zeros(0),
        node_end=leaf.new_zeros(0),
        node_offsets=offsets * 0,
        max_leaves=count,
        max_nodes=0,
    )
    return FurtherTexts(text, made, tile, asked & real, torch.zeros_like(end[:, 0], dtype=torch.bool))
