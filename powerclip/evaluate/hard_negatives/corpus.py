"""What a corpus of captions says about a change: could a sentence of it read so, and could it still be true?

Counts of a picture's own captions are always taken out: what they say is the truth, not evidence of what could be said.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from powerclip.evaluate.hard_negatives.sentences import Role

_EDGE = ("<", ">")  # before and after a sentence
_LONGEST = 5  # words of the longest sequences that are counted
_LEAST_TELLING, _MOST_TELLING = 10, 0.3  # captions with a word that tells what goes with it: a number, a share
_KEPT = 0.25  # of a sequence that was seen once, what counts; the rest is left to shorter ones


class Corpus:
    """Captions of images as lists of tokens; an image's captions are one list of `images`."""

    def __init__(self, images: Sequence[Sequence[Sequence[str]]]) -> None:
        self._images = images
        self._own: tuple[int, list[Counter[tuple[str, ...]]]] | None = None
        self._counts: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(_LONGEST)]
        self.between: dict[tuple[str, str], set[str]] = defaultdict(set)  # words seen between two others
        self._around: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)  # and the other way round
        self._alike: dict[tuple[str, str], float] = {}
        self._halves = [_Together(images, half) for half in (0, 1)]
        for captions in images:
            for tokens in captions:
                self._count(tokens, self._counts)
                padded = [_EDGE[0], *tokens, _EDGE[1]]
                for left, word, right in zip(padded, padded[1:], padded[2:], strict=False):
                    self.between[left, right].add(word)
                    self._around[word][left, right] += 1
        self._total = sum(self._counts[0].values())
        self._kinds = len(self._counts[0])
        # What can follow some words: how many different ones, as many discounts their count has.
        self._followers: list[Counter[tuple[str, ...]]] = [
            Counter(words[:-1] for words in counter) for counter in self._counts
        ]

    @staticmethod
    def _count(tokens: Sequence[str], counts: list[Counter[tuple[str, ...]]]) -> None:
        padded = (_EDGE[0], *tokens, _EDGE[1])
        for size, counter in enumerate(counts, 1):
            counter.update(padded[at : at + size] for at in range(len(padded) - size + 1))

    def _own_counts(self, image: int) -> list[Counter[tuple[str, ...]]]:
        if self._own is None or self._own[0] != image:
            own: list[Counter[tuple[str, ...]]] = [Counter() for _ in range(_LONGEST)]
            for tokens in self._images[image]:
                self._count(tokens, own)
            self._own = image, own
        return self._own[1]

    def seen(self, words: tuple[str, ...], image: int) -> int:
        """How often up to five words follow each other in captions of other images."""
        size = len(words) - 1
        return self._counts[size][words] - self._own_counts(image)[size][words]

    def log_probability(self, tokens: Sequence[str], image: int, first: int, last: int) -> float:
        """Of tokens `first` … `last` and the four after them, each given the four before it, in other images' captions.

        A model of five words with absolute discounting: what a reader guesses who sees no image.
        """
        padded = (_EDGE[0], *tokens, _EDGE[1])
        return sum(
            math.log(self._probability(padded[max(at - _LONGEST + 1, 0) : at + 1], image))
            for at in range(first + 1, min(last + _LONGEST + 1, len(padded)))
        )

    def _probability(self, words: tuple[str, ...], image: int) -> float:
        """Of the last word after the others; what their discounted counts leave goes by the shorter sequence."""
        if not words:
            return 1 / self._kinds
        shorter = self._probability(words[1:], image)
        before = self.seen(words[:-1], image) if len(words) > 1 else self._total
        if before <= 0:
            return shorter
        count = max(self.seen(words, image) - (1 - _KEPT), 0.0)
        left = (1 - _KEPT) * min(self._followers[len(words) - 1][words[:-1]], before)
        return (count + left * shorter) / before

    def alike(self, one: str, other: str) -> float:
        """How much two words are of a kind, 0 to 1: the cosine of the places in which they stand.

        A place is the word before and the word after; its count enters as the root, so that a few common places do not
        decide alone.
        """
        key = min(one, other), max(one, other)
        if key not in self._alike:
            ours, theirs = self._around[one], self._around[other]
            fewer, more = sorted((ours, theirs), key=len)
            shared = sum(math.sqrt(count * more[place]) for place, count in fewer.items() if place in more)
            norm = math.sqrt(sum(ours.values()) * sum(theirs.values()))
            self._alike[key] = shared / norm if norm else 0.0
        return self._alike[key]

    def coherence(self, word: str, others: Iterable[str], image: int) -> tuple[float, float]:
        """How well a word goes with the others of a caption, wherever they stand: a guess that needs no image.

        By two witnesses, the captions of every second image: how well they agree tells how much to trust their mean.
        """
        own = [set(tokens) for tokens in self._images[image]]
        others = list(others)
        even, odd = (
            half.coherence(word, others, own if image % 2 == number else []) for number, half in enumerate(self._halves)
        )
        return even, odd

    @cached_property
    def exclusion(self) -> Exclusion:
        """Which words exclude each other."""
        return Exclusion(self._images)


class _Together:
    """Which words captions say together; of every second image."""

    def __init__(self, images: Sequence[Sequence[Sequence[str]]], half: int) -> None:
        captions = [set(tokens) for image in range(half, len(images), 2) for tokens in images[image]]
        self._captions = len(captions)
        self._captions_with: dict[str, set[int]] = defaultdict(set)
        for number, caption in enumerate(captions):
            for word in caption:
                self._captions_with[word].add(number)
        self._both: dict[tuple[str, str], int] = {}

    def coherence(self, word: str, others: Sequence[str], own: Sequence[set[str]]) -> float:
        """The sum over other words of log (n + 1) / (e + 1).

        n captions say both, and e would by chance; `own` captions do not count. Words that very many captions say, or
        hardly one, tell nothing and are left out.
        """
        captions = self._captions - len(own)
        ours = len(self._captions_with.get(word, ())) - sum(word in caption for caption in own)
        total = 0.0
        for other in others:
            theirs = len(self._captions_with.get(other, ()))
            if not _LEAST_TELLING <= theirs <= _MOST_TELLING * self._captions or not other.isalpha():
                continue
            theirs -= sum(other in caption for caption in own)
            both = self._count(word, other) - sum({word, other} <= caption for caption in own)
            total += math.log((both + 1) / (ours * theirs / captions + 1))
        return total

    def _count(self, one: str, other: str) -> int:
        key = min(one, other), max(one, other)
        if key not in self._both:
            self._both[key] = len(self._captions_with.get(one, set()) & self._captions_with.get(other, set()))
        return self._both[key]


class Exclusion:
    """Whether two words are told of the same thing: by captions of one image that say the one and not the other.

    Where "man" is said, another caption of the image often says "person" and seldom "woman". The unit is a noun
    anywhere, an attribute of one noun ("brown" dog), a preposition before two words ("on" the grass).
    """

    def __init__(self, images: Sequence[Sequence[Sequence[str]]]) -> None:
        self._images_with: dict[Role, dict[tuple[tuple[str, ...], str], set[int]]] = {
            role: defaultdict(set) for role in ("noun", "attribute", "preposition")
        }
        self._images_about: dict[Role, Counter[tuple[str, ...]]] = {role: Counter() for role in self._images_with}
        for image, captions in enumerate(images):
            for role, units in self._images_with.items():
                own = {unit for tokens in captions for unit in _units(tokens, role)}
                for unit in own:
                    units[unit].add(image)
                self._images_about[role].update({context for context, _ in own})
        self._contexts: dict[Role, dict[str, list[tuple[str, ...]]]] = {}
        for role, units in self._images_with.items():
            contexts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
            for context, word in units:
                contexts[word].append(context)
            self._contexts[role] = contexts
        self._known: dict[tuple[Role, str, str], tuple[int, float]] = {}

    def together(self, role: Role, one: str, other: str) -> tuple[int, float]:
        """Images that are said to have both, in the same context, and how many would be by chance."""
        one, other = sorted((one, other))
        key = role, one, other
        if key not in self._known:
            units, about = self._images_with[role], self._images_about[role]
            both, expected = 0, 0.0
            for context in self._contexts[role].get(one, ()):
                ours, theirs = units[context, one], units.get((context, other), set())
                if theirs:
                    both += len(ours & theirs)
                    expected += len(ours) * len(theirs) / about[context]
            self._known[key] = both, expected
        return self._known[key]


def _units(tokens: Sequence[str], role: Role) -> list[tuple[tuple[str, ...], str]]:
    """The words of a caption with the context in which they would say something else of the same thing."""
    if role == "noun":
        return [((), word) for word in tokens]
    width = 1 if role == "attribute" else 2
    return [(tuple(tokens[at + 1 : at + 1 + width]), tokens[at]) for at in range(len(tokens) - width)]
