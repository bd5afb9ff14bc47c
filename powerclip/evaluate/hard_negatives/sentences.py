"""Captions as words with their places, and what the trees say of the words: heads, attributes, prepositions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from powerclip.data.trees import Tree
from powerclip.evaluate.grid import lowest_noun_phrases

Role = Literal["noun", "attribute", "preposition"]
ROLES: tuple[Role, ...] = ("noun", "attribute", "preposition")

_TOKEN = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
# Words that open a noun phrase or count its things, and are no attribute of them.
_FUNCTION_WORDS_TEXT = """
    a an the this that these those some any each every both all no one two three four five six seven eight nine
    ten several many few other another more most his her its their our my your and or of
"""
_FUNCTION_WORDS = frozenset(_FUNCTION_WORDS_TEXT.split())
_REFERRING_TEXT = """
    his her its their our my your it he she they him them himself herself itself themselves who which that what
    there other others another each one ones some all both something someone
"""
_REFERRING = frozenset(_REFERRING_TEXT.split())
_IRREGULAR_PLURALS_TEXT = """
    people men women children police feet teeth sheep geese fishermen policemen
"""
_IRREGULAR_PLURALS = frozenset(_IRREGULAR_PLURALS_TEXT.split())
_LEAST = 5  # times that a word must have a role before it may replace another
_LEAST_SHARE = {"noun": 0.7, "attribute": 0.5, "preposition": 0.5}  # of all its uses, those in this role


@dataclass(frozen=True)
class Phrase:
    """A lowest noun phrase: tokens `first` … `last`, the last one its head."""

    first: int
    last: int


@dataclass(frozen=True)
class Sentence:
    """A caption of an image: its tokens in lower case, where they stand, and their roles."""

    image: int
    text: str
    tokens: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    slots: dict[Role, tuple[int, ...]]  # numbers of tokens
    phrases: tuple[Phrase, ...]  # that may change places with another

    def replaced(self, at: int, word: str) -> str:
        """The caption with another word for one token."""
        return self._joined([(at, at, word)])

    def swapped(self, one: Phrase, other: Phrase) -> str:
        """The caption with two phrases in each other's place, `one` the earlier."""
        return self._joined([(one.first, one.last, self._said(other)), (other.first, other.last, self._said(one))])

    def exchanged(self, first: int, last: int) -> str:
        """The caption with two tokens in each other's place, `first` the earlier."""
        return self.swapped(Phrase(first, first), Phrase(last, last))

    def _said(self, phrase: Phrase) -> str:
        said = self.text[self.spans[phrase.first][0] : self.spans[phrase.last][1]]
        return said[0].lower() + said[1:] if phrase.first == 0 else said

    def _joined(self, changes: Iterable[tuple[int, int, str]]) -> str:
        parts, end = [], 0
        for first, last, words in changes:
            start = self.spans[first][0]
            capital = first == 0 and self.text[start].isupper()
            parts += [self.text[end:start], words[0].upper() + words[1:] if capital else words]
            end = self.spans[last][1]
        return "".join(parts) + self.text[end:]


def tokenize(text: str) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Words and marks of a text in lower case, and where they stand."""
    found = list(_TOKEN.finditer(text))
    return tuple(match[0].lower() for match in found), tuple(match.span() for match in found)


def read_sentence(image: int, text: str, tree: Tree) -> Sentence:
    """A caption with the roles of its words, as far as its tree tells them."""
    tokens, spans = tokenize(text)
    start_of = {start: number for number, (start, _) in enumerate(spans)}
    end_of = {end: number for number, (_, end) in enumerate(spans)}
    nouns, attributes, prepositions, phrases = [], [], [], []
    for node in lowest_noun_phrases(tree):
        first, last = start_of.get(node.start), end_of.get(node.end)
        if first is None or last is None or not tokens[last].isalpha():
            continue
        nouns.append(last)
        attributes += [at for at in range(first, last) if tokens[at].isalpha() and tokens[at] not in _FUNCTION_WORDS]
        if not _REFERRING & set(tokens[first : last + 1]):
            phrases.append(Phrase(first, last))
    for node in tree.nodes:
        first = start_of.get(node.start)
        if node.label == "PP" and first is not None and first + 2 < len(tokens) and tokens[first].isalpha():
            prepositions.append(first)
    slots: dict[Role, tuple[int, ...]] = {
        "noun": tuple(nouns),
        "attribute": tuple(attributes),
        "preposition": tuple(dict.fromkeys(prepositions)),
    }
    return Sentence(image, text, tokens, spans, slots, tuple(phrases))


def is_plural(noun: str) -> bool:
    """Whether a noun looks like a plural."""
    return noun in _IRREGULAR_PLURALS or (noun.endswith("s") and not noun.endswith(("ss", "us", "is")))


def vocabulary(sentences: Sequence[Sentence]) -> dict[Role, frozenset[str]]:
    """The words that are mostly used in each role, and often enough."""
    used = Counter(token for sentence in sentences for token in sentence.tokens)
    words: dict[Role, frozenset[str]] = {}
    for role in ROLES:
        counts = Counter(sentence.tokens[at] for sentence in sentences for at in sentence.slots[role])
        words[role] = frozenset(
            word
            for word, count in counts.items()
            if count >= _LEAST and count >= _LEAST_SHARE[role] * used[word] and word not in _REFERRING
        )
    return words
