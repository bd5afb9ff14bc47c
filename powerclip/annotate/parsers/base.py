"""What every parser is: captions in, phrases as character spans out, and a flat tree where there is no better one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from powerclip.annotate.parsers.english import is_english
from powerclip.data.trees import Span, flat_tree, is_word

Fallback = Literal["empty", "too long", "not English", "failed"]
LONGEST = 256  # words of a caption that is still parsed


@dataclass(frozen=True)
class Parsed:
    """A caption's phrases: `tree_from_spans(spans, caption).nodes == spans`.

    Phrases are in pre-order (the root first), no two cover the same words, and their edges are words, not punctuation.
    Only a caption without a word has none. `fallback` says why the tree is flat (the root alone) though a parser was
    asked; None when the parser made it.
    """

    spans: tuple[Span, ...]
    fallback: Fallback | None = None


class Parser(Protocol):
    """A constituency parser of raw captions."""

    name: str  # as `load_parser` knows it
    version: str  # changes whenever the same caption may get another tree

    def parse(self, captions: Sequence[str]) -> list[Parsed]:
        """The phrases of each caption, in order. What cannot be parsed gets a flat tree, never an exception."""
        ...


def flat(caption: str, reason: Fallback | None = None) -> Parsed:
    """The whole caption as one phrase, because of `reason`."""
    return Parsed(flat_tree(caption).nodes, reason)


def unparsable(caption: str) -> Fallback | None:
    """Why no parser should be asked about `caption`; None for a caption to parse. Words are counted at the spaces."""
    if not is_word(caption):
        return "empty"
    if len(caption.split()) > LONGEST:
        return "too long"
    return None if is_english(caption) else "not English"


class FlatParser:
    """No parser: every caption is one phrase."""

    name = "flat"
    version = "1"

    def parse(self, captions: Sequence[str]) -> list[Parsed]:
        """The root of each caption."""
        return [flat(caption, None if is_word(caption) else "empty") for caption in captions]
