"""Score parsers on treebanks: a model on the treebank's own words, any parser on raw text put together from them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from powerclip.annotate.parsers.base import Parser
from powerclip.annotate.parsers.model import ParserModel
from powerclip.annotate.parsers.scoring import Score
from powerclip.annotate.parsers.treebank import Sentence, genre

_NO_SPACE_BEFORE = frozenset(
    [",", ".", ":", ";", "?", "!", ")", "]", "}", "%", "…", "''", "”", "n't", "n’t", "n`t", "'", "’"]
)
_NO_SPACE_AFTER = frozenset(["(", "[", "{", "$", "£", "€", "#", "``", "“"])
_GLUE = frozenset(["HYPH", "POS"])
_CLITICS = ("'s", "'re", "'ve", "'ll", "'d", "'m", "’s", "’re", "’ve", "’ll", "’d", "’m")


def parse_words(model: ParserModel, sentences: Sequence[Sentence]) -> list[list[tuple[int, int, str]]]:
    """The model's spans for the words of `sentences`, with the labels of whole unary chains."""
    found: list[list[tuple[int, int, str]]] = [[] for _ in sentences]
    labels = model.lexicon.labels
    for phrases in model.phrases([sentence.words for sentence in sentences]):
        bounds = phrases.bounds.tolist()
        spans = list(zip(phrases.firsts.tolist(), phrases.ends.tolist(), phrases.labels.tolist(), strict=True))
        for at, number in enumerate(phrases.sentences.tolist()):
            found[number] = [(first, end, labels[label]) for first, end, label in spans[bounds[at] : bounds[at + 1]]]
    return found


def evaluate(model: ParserModel, sentences: Sequence[Sentence]) -> Score:
    """Score the model's trees against those of `sentences`, given their words."""
    score = Score()
    for sentence, spans in zip(sentences, parse_words(model, sentences), strict=True):
        score.add(spans, sentence.spans, sentence.tags)
    return score


def by_genre(model: ParserModel, sentences: Sequence[Sentence]) -> dict[str, Score]:
    """The same for each genre of the treebank."""
    genres = sorted({genre(sentence.document) for sentence in sentences})
    return {
        name: evaluate(model, [sentence for sentence in sentences if genre(sentence.document) == name])
        for name in genres
    }


def raw_score(parser: Parser, sentences: Sequence[Sentence]) -> Score:
    """Score any parser's phrases of raw text.

    Its phrases are nodes: of a unary chain they have one label. So the treebank's chains are cut to their lowest label
    as well, and the figures are those of distinct phrases. A phrase that ends inside a word of the treebank is widened
    to it.
    """
    texts = [detokenize(sentence) for sentence in sentences]
    score = Score()
    parsed = parser.parse([text for text, _ in texts])
    for sentence, (_, offsets), found in zip(sentences, texts, parsed, strict=True):
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        guess = {}
        for span in found.spans:
            guess[bisect_right(starts, span.start) - 1, bisect_left(ends, span.end) + 1] = span.label
        gold = [(first, end, chain.rsplit("+", 1)[-1]) for first, end, chain in sentence.spans]
        score.add([(*span, label) for span, label in guess.items()], gold, sentence.tags)
    return score


def detokenize(sentence: Sentence) -> tuple[str, list[tuple[int, int]]]:
    """The sentence as people write it, and where each of its words stands in it."""
    text = ""
    offsets = []
    glued = True
    open_quote = False
    for word, tag in zip(sentence.words, sentence.tags, strict=True):
        written = '"' if word in ("``", "''") else word
        closes = written == '"' and open_quote
        before = glued or closes or word in _NO_SPACE_BEFORE or tag in _GLUE or word.lower().endswith(_CLITICS)
        text += "" if before else " "
        offsets.append((len(text), len(text) + len(written)))
        text += written
        if written == '"':
            open_quote = not open_quote
        glued = word in _NO_SPACE_AFTER or tag == "HYPH" or (written == '"' and open_quote)
    return text, offsets
