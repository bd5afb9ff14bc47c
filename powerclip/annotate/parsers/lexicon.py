"""The embedded parser's words and labels, and how words become numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from powerclip.annotate.parsers.word_features import BEGIN, END, UNKNOWN, hashed, normalise

CHAIN = "+"  # between the labels of a unary chain, the highest first: (S (VP …)) is S+VP


class Lexicon:
    """Vocabulary and labels, fixed at training; and a row for each word met since, which only memory limits."""

    def __init__(self, words: Sequence[str], labels: Sequence[str], buckets: int) -> None:
        self.words = list(words)
        self.labels = list(labels)
        self.buckets = buckets
        self._vocabulary = {word: row for row, word in enumerate(self.words)}
        self._label = {label: row for row, label in enumerate(self.labels)}
        self.clear()

    def clear(self) -> None:
        """Forget the words met: the begin and end marks stay, as rows 0 and 1."""
        self.rows: dict[str, int] = {"": 0, " ": 1}  # what is no word cannot be met
        self.vocabulary_of = [BEGIN, END]
        self.pieces_of: list[list[int]] = [[0], [1]]

    def row(self, word: str) -> int:
        """The row of a word, new or met before."""
        row = self.rows.get(word)
        if row is None:
            row = self.rows[word] = len(self.vocabulary_of)
            normalised = normalise(word)
            self.vocabulary_of.append(self._vocabulary.get(normalised.lower(), UNKNOWN))
            self.pieces_of.append(hashed(normalised, self.buckets))
        return row

    def label(self, chain: str) -> int:
        """The number of a label; a chain too rare for one is known by its lowest label."""
        lowest = chain.rsplit(CHAIN, 1)[-1]
        return self._label.get(chain, self._label.get(lowest, self._label.get("NP", 0)))

    def pieces(self, rows: Iterable[int]) -> tuple[Tensor, Tensor]:
        """The pieces of the words at `rows`, end to end, and where each word's begin (and the last one's end)."""
        flat: list[int] = []
        offsets = [0]
        for row in rows:
            flat += self.pieces_of[row]
            offsets.append(len(flat))
        return torch.tensor(flat), torch.tensor(offsets)
