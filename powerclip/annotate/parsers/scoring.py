"""How alike two sets of trees are: precision, recall and F1 of their brackets.

The counts are evalb's with the settings of Collins: punctuation (by the tags , . : `` '') is taken out before spans are
compared, the root bracket is left out, a unary chain counts as many brackets as it has labels, and phrases of one word
count. *Labelled* asks for the same span and label, *unlabelled* for the same span. Beside them stands the strictest
figure, *inner*: distinct spans of several words, less than the whole sentence, where chance has least to give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from powerclip.annotate.parsers.treebank import CHAIN, WHOLE

PUNCTUATION = frozenset([",", ".", ":", "``", "''"])
Spans = Iterable[tuple[int, int, str]]
KINDS = ("labelled", "unlabelled", "inner")


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
        found, truth = _brackets(guess, tags), _brackets(gold, tags)
        for kind in KINDS:
            self.agree[kind] += (found[kind] & truth[kind]).total()
            self.guessed[kind] += found[kind].total()
            self.right[kind] += truth[kind].total()
        self.sentences += 1
        self.exact += found["labelled"] == truth["labelled"]

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
