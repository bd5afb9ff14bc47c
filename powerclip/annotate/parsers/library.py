"""What adapters of parsing libraries share: clean text in, offsets of the raw caption out, failures made flat trees."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from powerclip.annotate.parsers.base import Parsed, flat, unparsable
from powerclip.data.trees import Span, tree_from_spans
from powerclip.errors import UserError

# Spaces, control characters and half surrogates: libraries stumble over them in various ways.
_GAP = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u200b\u2028\u2029\ufeff\ud800-\udfff]+")


class LibraryParser(ABC):
    """A parser that some library provides: an adapter says how to ask it, and how to read its answer."""

    name: str
    version: str

    @abstractmethod
    def documents(self, texts: list[str]) -> list[Any]:
        """The library's answer for each text; may raise whatever the library raises."""

    @abstractmethod
    def phrases(self, document: Any) -> list[Span]:
        """The phrases of one answer, as offsets into its text; where two cover the same words, the lower one last."""

    def parse(self, captions: Sequence[str]) -> list[Parsed]:
        """The phrases of each caption, in order."""
        reasons = [unparsable(caption) for caption in captions]
        texts = [squeeze(caption) for caption in captions]
        parsable = [number for number, reason in enumerate(reasons) if reason is None]
        answers = dict(zip(parsable, self._answers([texts[number][0] for number in parsable]), strict=True))
        parsed = []
        for number, caption in enumerate(captions):
            if number in answers:
                parsed.append(self._read(answers[number], caption, texts[number][1]))
            else:
                parsed.append(flat(caption, reasons[number]))
        return parsed

    def _answers(self, texts: list[str]) -> list[Any]:
        """Ask about all texts at once; if that fails, one by one, with None for those that fail."""
        if not texts:
            return []
        try:
            return self.documents(texts)
        except Exception:  # one caption may make a library raise anything; the others still get their trees
            if len(texts) == 1:
                return [None]
        return [answer for text in texts for answer in self._answers([text])]

    def _read(self, document: Any, caption: str, positions: list[int]) -> Parsed:
        if document is None:
            return flat(caption, "failed")
        try:
            phrases = self.phrases(document)
            spans = [Span(positions[phrase.start], positions[phrase.end - 1] + 1, phrase.label) for phrase in phrases]
            return Parsed(tree_from_spans(spans, caption).nodes)
        except (UserError, IndexError):  # phrases that cross, or lie outside the text
            return flat(caption, "failed")


def squeeze(caption: str) -> tuple[str, list[int]]:
    """The caption with one space for each gap and none at its ends, and where each character of it stood."""
    text: list[str] = []
    positions: list[int] = []
    position = 0
    for gap in _GAP.finditer(caption):
        text.append(caption[position : gap.start()])
        positions.extend(range(position, gap.start()))
        if positions and gap.end() < len(caption):
            text.append(" ")
            positions.append(gap.start())
        position = gap.end()
    text.append(caption[position:])
    positions.extend(range(position, len(caption)))
    return "".join(text), positions
