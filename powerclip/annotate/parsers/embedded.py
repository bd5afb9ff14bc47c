"""The parser that ships with the package: raw captions to phrases, with no download and no tagger."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from powerclip.annotate.parsers.base import LONGEST, Fallback, Parsed, flat
from powerclip.annotate.parsers.english import is_english
from powerclip.annotate.parsers.lexicon import CHAIN
from powerclip.annotate.parsers.model import Decoded, DecodedPhrases, load_model
from powerclip.annotate.parsers.word_tokenizer import cut
from powerclip.data.trees import Span

WEIGHTS = Path(__file__).parent / "weights" / "parser.safetensors"
_CODE = "1"  # raise it when the tokeniser or the conversion to spans changes a tree
_MOST_TOKENS = 2 * LONGEST  # words and punctuation
_AT_ONCE = 16_384  # captions in memory as charts and tables


@dataclass(frozen=True)
class _Sentence:
    """A caption to parse: its tokens, and where the words of any run of them begin and end in the caption."""

    caption: int
    tokens: list[str]
    starts: list[int]  # of the first word at or after each token
    ends: list[int]  # of the last word up to each token


@dataclass(frozen=True)
class _Started:
    """Captions on their way: those with a flat tree have it, the others are with the model."""

    parsed: list[Parsed | None]
    sentences: list[_Sentence]
    decoded: list[Decoded]


class EmbeddedParser:
    """Span scores of a small LSTM, and the best tree of each caption by exact chart decoding.

    Args:
        device: `cpu`, `cuda`, …
        weights: another file that `tools/parser/train.py` wrote.

    Raises:
        UserError: the weights cannot be read.
    """

    name = "embedded"

    def __init__(self, device: torch.device | str = "cpu", weights: Path | str | None = None) -> None:
        path = Path(weights) if weights else WEIGHTS
        self.model = load_model(path, torch.device(device))
        self.version = f"{_CODE}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
        # Trees keep the lowest label of a unary chain: it says most about what the words are.
        self._labels = [label.rsplit(CHAIN, 1)[-1] for label in self.model.lexicon.labels]

    def parse(self, captions: Sequence[str]) -> list[Parsed]:
        """The phrases of each caption, in order."""
        parsed: list[Parsed] = []
        before: _Started | None = None
        # While a GPU works on some captions, the next ones are cut into words.
        with _without_collector():
            for start in range(0, len(captions), _AT_ONCE):
                started = self._start(captions[start : start + _AT_ONCE])
                parsed += self._finish(before) if before else []
                before = started
            return parsed + (self._finish(before) if before else [])

    def _start(self, captions: Sequence[str]) -> _Started:
        parsed: list[Parsed | None] = [None] * len(captions)
        sentences = []
        for number, caption in enumerate(captions):
            sentence = self._sentence(number, caption)
            if isinstance(sentence, Parsed):
                parsed[number] = sentence
            else:
                sentences.append(sentence)
        return _Started(parsed, sentences, self.model.submit([sentence.tokens for sentence in sentences]))

    def _finish(self, started: _Started) -> list[Parsed]:
        for phrases in self.model.collect(started.decoded):
            group = [started.sentences[number] for number in phrases.sentences.tolist()]
            for sentence, tree in zip(group, _read(group, phrases, self._labels), strict=True):
                started.parsed[sentence.caption] = tree
        return [tree for tree in started.parsed if tree is not None]

    def _sentence(self, number: int, caption: str) -> _Sentence | Parsed:
        """The caption's tokens, or its flat tree."""
        tokens: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        words = position = stop = 0
        chunks = caption.rstrip().split(" ")
        final = len(chunks) - 1
        for at, chunk in enumerate(chunks):
            for token, _, _, first, end in cut(chunk, at == final):
                tokens.append(token)
                if end:
                    words += 1
                    stop = position + end
                    starts.append(position + first)
                else:
                    starts.append(-1)  # filled in below: where the next word starts
                ends.append(stop)
            position += len(chunk) + 1
        reason = _reason(caption, words, len(tokens))
        if reason:
            return flat(caption, reason)
        if words < len(tokens):
            following = len(caption)
            for at in range(len(tokens) - 1, -1, -1):
                if starts[at] < 0:
                    starts[at] = following
                following = starts[at]
        return _Sentence(number, tokens, starts, ends)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Leave cyclic garbage for later: hundreds of thousands of new tokens and phrases, none of them in a cycle, make
    Python search all of memory for cycles again and again, which takes longer than what makes them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _reason(caption: str, words: int, tokens: int) -> Fallback | None:
    """Why a caption is not parsed; as `unparsable` says, with the words counted by our tokeniser."""
    if not words:
        return "empty"
    if words > LONGEST or tokens > _MOST_TOKENS:
        return "too long"
    return None if is_english(caption) else "not English"


def _read(group: list[_Sentence], phrases: DecodedPhrases, labels: list[str]) -> Iterator[Parsed]:
    """Phrases over tokens, in pre-order, as phrases over characters."""
    sentence = np.repeat(np.arange(len(group)), np.diff(phrases.bounds))
    counts = np.array([len(one.tokens) for one in group])
    offsets = (np.cumsum(counts) - counts)[sentence]
    starts = np.array([start for one in group for start in one.starts])[offsets + phrases.firsts]
    ends = np.array([end for one in group for end in one.ends])[offsets + phrases.ends - 1]
    words = np.flatnonzero(starts < ends)  # the rest is punctuation alone
    same = np.zeros(len(words), dtype=bool)
    # Where punctuation alone makes the difference to the phrase inside, which comes next, the lower one's label stays.
    current, following = words[:-1], words[1:]
    same[:-1] = (
        (sentence[current] == sentence[following])
        & (starts[current] == starts[following])
        & (ends[current] == ends[following])
    )
    kept = words[~same]
    bounds = np.searchsorted(sentence[kept], np.arange(len(group) + 1)).tolist()
    names = [labels[label] for label in phrases.labels[kept].tolist()]
    spans = list(map(Span, starts[kept].tolist(), ends[kept].tolist(), names))
    for at in range(len(group)):
        yield Parsed(tuple(spans[bounds[at] : bounds[at + 1]]))
