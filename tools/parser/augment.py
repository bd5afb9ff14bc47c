"""Sentences of a treebank, written as captions might be: no capitals or many, no full stop, hyphens kept."""

from __future__ import annotations

import random

from treebank import Sentence

_HYPHEN = "HYPH"


def augment(sentence: Sentence, draw: random.Random) -> Sentence:
    """The same tree as a caption might be written; most sentences stay as they are."""
    if draw.random() < 0.5:
        sentence = join_hyphens(sentence)
    if draw.random() < 0.2:
        sentence = drop_full_stop(sentence)
    words, casing = sentence.words, draw.random()
    if casing < 0.15:
        words = tuple(word.lower() for word in words)
    elif casing < 0.19:
        words = tuple(word.title() if len(word) > 1 else word.upper() for word in words)
    elif casing < 0.21:
        words = tuple(word.upper() for word in words)
    return Sentence(words, sentence.tags, sentence.spans, sentence.document)


def join_hyphens(sentence: Sentence) -> Sentence:
    """One word for `snow`, `-`, `covered` where no phrase begins or ends between them.

    GUM's words end at hyphens; those of captions, in our tokeniser as in others, do not.
    """
    edges = {edge for first, end, _ in sentence.spans for edge in (first, end)}
    words: list[str] = []
    tags: list[str] = []
    position_of = []  # new position of each old word's left edge
    glue = False
    for at, (word, tag) in enumerate(zip(sentence.words, sentence.tags, strict=True)):
        starts_join = tag == _HYPHEN and 0 < at < len(sentence.words) - 1 and not {at, at + 1} & edges
        if glue or (starts_join and words):
            position_of.append(len(words) - 1)
            words[-1] += word
            tags[-1] = tag if glue else tags[-1]
        else:
            position_of.append(len(words))
            words.append(word)
            tags.append(tag)
        glue = starts_join
    position_of.append(len(words))
    spans = tuple((position_of[first], position_of[end], label) for first, end, label in sentence.spans)
    return Sentence(tuple(words), tuple(tags), spans, sentence.document)


def drop_full_stop(sentence: Sentence) -> Sentence:
    """The sentence without its last word when that is a full stop."""
    size = len(sentence.words) - 1
    if sentence.tags[-1] != "." or size < 1:
        return sentence
    kept = {(first, min(end, size)): label for first, end, label in sentence.spans if first < size}
    # Where the full stop made the difference, the phrase inside keeps its own label: the first one is the wider.
    for first, end, label in sentence.spans:
        if end <= size:
            kept[first, end] = label
    return Sentence(
        sentence.words[:-1],
        sentence.tags[:-1],
        tuple((*span, label) for span, label in kept.items()),
        sentence.document,
    )
