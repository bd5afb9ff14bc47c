"""Score parsers on treebanks: a model on the treebank's own words, any parser on raw text put together from them.

A score is precision, recall and F1 of brackets.

The counts are evalb's with the settings of Collins: punctuation (by the tags , . : `` '') is taken out before spans are
compared, the root bracket is left out, a unary chain counts as many brackets as it has labels, and phrases of one word
count. *Labelled* asks for the same span and label, *unlabelled* for the same span. Beside them stands the strictest
figure, *inner*: distinct spans of several words, less than the whole sentence, where chance has least to give.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from treebank import WHOLE, Sentence, genre

from powerclip.annotate.parsers.base import Parser
from powerclip.annotate.parsers.lexicon import CHAIN
from powerclip.annotate.parsers.model import ParserModel

PUNCTUATION = frozenset([",", ".", ":", "``", "''"])
Spans = Iterable[tuple[int, int, str]]
KINDS = ("labelled", "unlabelled", "inner")
_NO_SPACE_BEFORE = frozenset(
    [",", ".", ":", ";", "?", "!", ")", "]", "}", "%", "…", "''", "”", "n't", "n’t", "n`t", "'", "’"]
)
_NO_SPACE_AFTER = frozenset(["(", "[", "{", "$", "£", "€", "#", "``", "“"])
_GLUE = frozenset(["HYPH", "POS"])
_CLITICS = ("'s", "'re", "'ve", "'ll", "'d", "'m", "’s", "’re", "’ve", "’ll", "’d", "’m")


@dataclass
class Score:
    """Brackets that agree, that were guessed and that are right, summed over sentences, for each of `KINDS`."""

    agree: Counter[str] = field(default_factory=Counter)
    guessed: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    sentences: int = 0
    exact: int = 0

    def add(self, guess: Spans, gold: Spans, tags: Sequence[str]) -> None:
        """Count one sentence, whose words have the gold `tags`."""
        guessed, expected = _brackets(guess, tags), _brackets(gold, tags)
        for kind in KINDS:
            self.agree[kind] += (guessed[kind] & expected[kind]).total()
            self.guessed[kind] += guessed[kind].total()
            self.right[kind] += expected[kind].total()
        self.sentences += 1
        self.exact += guessed["labelled"] == expected["labelled"]

    def f1(self, kind: str) -> float:
        """F1 in percent; 0 when there is nothing to count."""
        return 200 * self.agree[kind] / max(1, self.guessed[kind] + self.right[kind])

    def precision(self, kind: str) -> float:
        """How many of the guessed brackets are right, in percent."""
        return 100 * self.agree[kind] / max(1, self.guessed[kind])

    def recall(self, kind: str) -> float:
        """How many of the right brackets were guessed, in percent."""
        return 100 * self.agree[kind] / max(1, self.right[kind])

    def summary(self) -> dict[str, float]:
        """What a card or a table says of it."""
        figures: dict[str, float] = {"sentences": self.sentences, "exact": 100 * self.exact / max(1, self.sentences)}
        for kind in KINDS:
            figures[f"{kind}_f1"] = self.f1(kind)
            figures[f"{kind}_precision"] = self.precision(kind)
            figures[f"{kind}_recall"] = self.recall(kind)
        return {name: round(figure, 2) for name, figure in figures.items()}


def _brackets(spans: Spans, tags: Sequence[str]) -> dict[str, Counter[tuple[int, int, str]]]:
    """The brackets of one tree, without punctuation, as each kind of score counts them."""
    before = [0]  # words that are no punctuation, before each word
    for tag in tags:
        before.append(before[-1] + (tag not in PUNCTUATION))
    labelled: Counter[tuple[int, int, str]] = Counter()
    for first, end, chain in spans:
        if before[first] < before[end]:
            labelled.update((before[first], before[end], label) for label in chain.split(CHAIN) if label != WHOLE)
    unlabelled: Counter[tuple[int, int, str]] = Counter()
    for (first, end, _), count in labelled.items():
        unlabelled[first, end, ""] += count
    inner = Counter(span for span in unlabelled if 1 < span[1] - span[0] < before[-1])
    return {"labelled": labelled, "unlabelled": unlabelled, "inner": inner}


def parse_words(model: ParserModel, sentences: Sequence[Sentence]) -> list[list[tuple[int, int, str]]]:
    """The model's spans for the words of `sentences`, with the labels of whole unary chains."""
    parsed: list[list[tuple[int, int, str]]] = [[] for _ in sentences]
    labels = model.lexicon.labels
    for phrases in model.phrases([sentence.words for sentence in sentences]):
        bounds = phrases.bounds.tolist()
        spans = list(zip(phrases.firsts.tolist(), phrases.ends.tolist(), phrases.labels.tolist(), strict=True))
        for at, number in enumerate(phrases.sentences.tolist()):
            parsed[number] = [(first, end, labels[label]) for first, end, label in spans[bounds[at] : bounds[at + 1]]]
    return parsed


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
    for sentence, (_, offsets), tree in zip(sentences, texts, parsed, strict=True):
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        guess = {}
        for span in tree.spans:
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
