"""From captions and trees to hard negatives that a reader without the image cannot tell.

Five kinds, by SugarCrepe's names: `replace_obj` (a noun), `replace_att` (an attribute of one), `replace_rel` (a
preposition), each by one of its kind from other captions; `swap_obj` (two noun phrases exchanged) and `swap_att` (the
attributes of two). A change is kept where

- it reads as a sentence of the corpus could: the new word and its neighbours follow each other in captions of other
  images, it suits the rest of the caption, a noun keeps its number;
- it is not still true, by the captions' own evidence: the new word is in no caption of the image, and the two words
  exclude each other (`Exclusion`).

**Couples.** Negatives come in couples: a caption whose "dog" becomes "cat" with one whose "cat" becomes "dog"; one that
names the man before the dog with one that names the dog before the man. A model that reads only the changed words, and
no image, is right in exactly one of the two. Two more readers are balanced in each couple: a model of five words
(`Corpus.log_probability`), which is right in one, and coherence (`Corpus.coherence`), whose evidence sums to nothing.
Without the latter, the truth goes better with the rest of its caption in 85 % of the changed nouns; and a text tower
puts what does not go together nearer to the mean of all texts, so that the mean image prefers negatives.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import correlation, mean, stdev

from powerclip.data.keyed_random import key_of, permutation
from powerclip.data.trees import Tree
from powerclip.evaluate.hard_negatives.corpus import Corpus
from powerclip.evaluate.hard_negatives.sentences import (
    Phrase,
    Role,
    Sentence,
    is_plural,
    read_sentence,
    tokenize,
    vocabulary,
)

KINDS = ("replace_obj", "replace_att", "replace_rel", "swap_obj", "swap_att")
MOST = 4000  # negatives of a kind
_MOST_ALIKE = 60  # couples of the same two words
_MOST_OF_CAPTION = 4  # negatives of a kind from one caption
_ROLES: dict[str, Role] = {"replace_obj": "noun", "replace_att": "attribute", "replace_rel": "preposition"}
# Two words exclude each other when both are said of an image at most this share as often as by chance, and chance
# would have them together in at least that many images.
_MOST_TOGETHER = {"noun": 0.45, "attribute": 0.5, "preposition": 0.2}
_LEAST_EXPECTED = {"noun": 2.0, "attribute": 1.0, "preposition": 2.0}
# Two words are of a kind when the places in which they stand have this cosine ("field" and "hill", "black" and "red").
_LEAST_ALIKE = {"noun": 0.32, "attribute": 0.2, "preposition": 0.0}
# In a couple, what coherence tells for one caption it tells against the other's, to this many natural logarithms.
_MOST_INCOHERENT = 1.0
# A replaced word may tell this much against itself, in natural logarithms: by the words around it, and by coherence.
_MOST_UNLIKELY = 6.0
# Words around a new one that must be seen with it, from and to which place: the word between its neighbours, and one of
# the two sides (of a preposition the side that it governs); of exchanged words each neighbour.
_BETWEEN, _LEFT, _RIGHT = (-1, 1), (-2, 0), (0, 2)
_SIDES: dict[Role, tuple[tuple[int, int], ...]] = {
    "noun": (_LEFT, _RIGHT),
    "attribute": (_LEFT, _RIGHT),
    "preposition": (_RIGHT,),
}
_NEIGHBOURS = ((-1, 0), (0, 1))
# Prepositions that say too little to be false, or that have no place as their meaning.
_VAGUE_TEXT = """
    of with for like to at by near from during full around after before as than
"""
_VAGUE = frozenset(_VAGUE_TEXT.split())
# Ways through something, often true together: a dog that runs over the grass runs through it, and in it.
_WAYS = frozenset(("over", "through", "across", "into", "onto", "along", "past", "in"))
# Words that are singular and go with "are", or name a part of the rest: exchanged, they seldom read well.
_COLLECTIVE_TEXT = """
    couple group crowd family team bunch pair lot number side top front middle back
"""
_COLLECTIVE = frozenset(_COLLECTIVE_TEXT.split())
_PRONOUNS_TEXT = """
    he she it his her hers its him himself herself itself they their them themselves
"""
_PRONOUNS = frozenset(_PRONOUNS_TEXT.split())
_ARTICLES = frozenset(("a", "an", "the"))
# Between two phrases these words say as much when the phrases change places.
_SYMMETRIC_TEXT = """
    and or , with near beside next to by together alongside while is are as facing plays playing play sits sitting
    stands standing poses posing walks walking run runs running
"""
_SYMMETRIC = frozenset(_SYMMETRIC_TEXT.split())


@dataclass(frozen=True)
class Negative:
    """A caption of an image, and a false one."""

    image: int
    kind: str
    caption: str
    negative: str
    prior: bool  # whether the model of five words prefers the caption


@dataclass(frozen=True)
class Made:
    """Negatives, and how they came about."""

    negatives: list[Negative]
    candidates: dict[str, int]  # kind → changes that read well and are false, before couples were made

    def counts(self) -> dict[str, int]:
        """Kind → negatives."""
        found = Counter(negative.kind for negative in self.negatives)
        return {kind: found[kind] for kind in KINDS}


@dataclass(frozen=True)
class _Candidate:
    """A change of a caption, of the words or heads `couple[0]` to `couple[1]`."""

    couple: tuple[str, str]
    sentence: int
    negative: Negative
    coherence: tuple[float, float]  # of the caption's word, less that of the negative's: by two witnesses


def make_negatives(
    captions: Sequence[str],
    image_of_caption: Sequence[int],
    trees: Sequence[Tree],
    more: Sequence[Sequence[str]] = (),
    *,
    most: int = MOST,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Made:
    """Hard negatives of captions; the same for the same captions and seed.

    Args:
        captions: of all images.
        image_of_caption: the number of each caption's image.
        trees: of each caption.
        more: captions of other images, image by image, as further evidence of what can be said.
        most: negatives of a kind.
        seed: of the order in which couples are tried.
        on_progress: called with the number of captions that have been read for changes.
    """
    sentences = [read_sentence(*parts) for parts in zip(image_of_caption, captions, trees, strict=True)]
    images: list[list[Sequence[str]]] = [[] for _ in range(max(image_of_caption, default=-1) + 1)]
    for sentence in sentences:
        images[sentence.image].append(sentence.tokens)
    corpus = Corpus([*images, *([tokenize(text)[0] for text in texts] for texts in more)])
    words = vocabulary(sentences)
    said = [{word for tokens in of_image for word in tokens} for of_image in images]
    texts: list[set[str]] = [set() for _ in images]
    for sentence in sentences:
        texts[sentence.image].add(" ".join(sentence.tokens))
    found: dict[str, list[_Candidate]] = {kind: [] for kind in KINDS}
    for number, sentence in sorted(enumerate(sentences), key=lambda pair: pair[1].image):
        changes = [
            *(
                (kind, *change)
                for kind, role in _ROLES.items()
                for change in _replacements(sentence, role, words, corpus)
            ),
            *(("swap_obj", *change) for change in _swaps(sentence, corpus)),
            *(("swap_att", *change) for change in _attribute_swaps(sentence, words, corpus)),
        ]
        for kind, couple, text, first, last in changes:
            tokens = tokenize(text)[0]
            is_swap = kind.startswith("swap")
            if " ".join(tokens) in texts[sentence.image] or (not is_swap and couple[1] in said[sentence.image]):
                continue
            # The tokens of a change are as many as those that it replaces: both sides have the same words around.
            true, false = (
                corpus.log_probability(side, sentence.image, first, last) for side in (sentence.tokens, tokens)
            )
            coherence = (0.0, 0.0) if is_swap else _coherence_gap(sentence, couple, corpus)
            if is_swap or max(true - false, mean(coherence)) <= _MOST_UNLIKELY:
                negative = Negative(sentence.image, kind, sentence.text, text, true > false)
                found[kind].append(_Candidate(couple, number, negative, coherence))
        on_progress(number + 1)
    negatives = [one for kind in KINDS for one in _couples(found[kind], most, key_of(seed, KINDS.index(kind)))]
    return Made(negatives, {kind: len(candidates) for kind, candidates in found.items()})


def to_json(made: Made, names: Sequence[str]) -> str:
    """SugarCrepe's format, with the kind of each item; `names` are the images' file names."""
    items = {
        str(number): {
            "filename": names[one.image],
            "caption": one.caption,
            "negative_caption": one.negative,
            "kind": one.kind,
        }
        for number, one in enumerate(made.negatives)
    }
    return json.dumps(items, indent=1, ensure_ascii=False) + "\n"


_Way = tuple[_Candidate, float]  # with its coherence
_Change = tuple[tuple[str, str], str, int, int]  # the two words, the changed caption, first and last token that differ


def _replacements(
    sentence: Sentence, role: Role, words: dict[Role, frozenset[str]], corpus: Corpus
) -> Iterator[_Change]:
    tokens = ("<", *sentence.tokens, ">")
    for at in sentence.slots[role]:
        word = sentence.tokens[at]
        if word not in words[role] or word in _VAGUE or (role == "noun" and _is_bound(sentence, at)):
            continue
        # Sorted, so that the same captions always give the same negatives.
        for other in sorted(corpus.between[tokens[at], tokens[at + 2]] & words[role]):
            if other == word or other in _VAGUE or {word, other} <= _WAYS:
                continue
            if role == "noun" and not _agree(word, other):
                continue
            if (
                corpus.alike(word, other) >= _LEAST_ALIKE[role]
                and _reads(tokens, at + 1, other, sentence.image, corpus, (_BETWEEN,))
                and any(_reads(tokens, at + 1, other, sentence.image, corpus, (side,)) for side in _SIDES[role])
                and _excludes(role, word, other, corpus)
            ):
                yield (word, other), sentence.replaced(at, other), at, at


def _coherence_gap(sentence: Sentence, couple: tuple[str, str], corpus: Corpus) -> tuple[float, float]:
    """How much better the caption's word goes with the others than the new one does, by two witnesses."""
    others = sorted(set(sentence.tokens) - set(couple))
    true, false = (corpus.coherence(word, others, sentence.image) for word in couple)
    return true[0] - false[0], true[1] - false[1]


def _believed(candidates: Sequence[_Candidate]) -> list[float]:
    """The coherence of candidates as further captions would tell it.

    Captions favour the true word on average, and a count that does not is partly luck: what two halves of the captions
    do not agree on goes back to the mean (regression to the mean, with the reliability of Spearman and Brown).
    """
    gaps = [mean(candidate.coherence) for candidate in candidates]
    even, odd = ([candidate.coherence[half] for candidate in candidates] for half in (0, 1))
    if len(candidates) < 2 or not (stdev(even) and stdev(odd)):
        return gaps
    agreement = max(correlation(even, odd), 0.0)
    reliability, average = 2 * agreement / (1 + agreement), mean(gaps)
    return [average + reliability * (gap - average) for gap in gaps]


def _is_bound(sentence: Sentence, at: int) -> bool:
    """Whether a later pronoun may stand for the noun at this place: it would no longer agree."""
    return not _PRONOUNS.isdisjoint(sentence.tokens[at + 1 :])


def _agree(noun: str, other: str) -> bool:
    return is_plural(noun) == is_plural(other) and _COLLECTIVE.isdisjoint((noun, other))


def _reads(
    tokens: Sequence[str], at: int, word: str, image: int, corpus: Corpus, windows: Sequence[tuple[int, int]]
) -> bool:
    """Whether a new word and those around it follow each other in captions of other images.

    The windows are first and last places, counted from the word; one that reaches over the caption's end is left out.
    """
    if tokens[at - 1] in ("a", "an") and (tokens[at - 1] == "an") != (word[0] in "aeiou"):
        return False
    changed = (*tokens[:at], word, *tokens[at + 1 :])
    inside = [(at + first, at + last + 1) for first, last in windows if at + first >= 0 and at + last < len(changed)]
    return all(corpus.seen(changed[first:end], image) > 0 for first, end in inside)


def _excludes(role: Role, word: str, other: str, corpus: Corpus) -> bool:
    both, expected = corpus.exclusion.together(role, word, other)
    return expected >= _LEAST_EXPECTED[role] and both <= _MOST_TOGETHER[role] * expected


def _swaps(sentence: Sentence, corpus: Corpus) -> Iterator[_Change]:
    tokens = sentence.tokens
    for one, other in combinations(sentence.phrases, 2):
        between = tokens[one.last + 1 : other.first]
        heads = tokens[one.last], tokens[other.last]
        if not between or _SYMMETRIC.issuperset(between) or not _agree(*heads):
            continue
        says = [set(tokens[phrase.first : phrase.last]) - _ARTICLES for phrase in (one, other)]
        if heads[0] == heads[1] and (says[0] <= says[1] or says[1] <= says[0]):
            continue  # "a dog" and "a brown dog" exchanged may still be true
        if heads[0] != heads[1] and (corpus.alike(*heads) < _LEAST_ALIKE["noun"] or _is_bound(sentence, one.last)):
            continue
        if _junctions_read(sentence, one, other, corpus):
            yield heads, sentence.swapped(one, other), one.first, other.last


def _attribute_swaps(sentence: Sentence, words: dict[Role, frozenset[str]], corpus: Corpus) -> Iterator[_Change]:
    tokens = ("<", *sentence.tokens, ">")
    for first, last in combinations(sentence.slots["attribute"], 2):
        one, other = sentence.tokens[first], sentence.tokens[last]
        is_one_phrase = any(phrase.first <= first and last <= phrase.last for phrase in sentence.phrases)
        if (
            one == other
            or is_one_phrase
            or not _excludes("attribute", one, other, corpus)  # "small" and "little"
            or not {one, other} <= words["attribute"]
            or tokens[first + 2] == tokens[last + 2]
        ):
            continue
        if (
            corpus.alike(one, other) >= _LEAST_ALIKE["attribute"]
            and _reads(tokens, first + 1, other, sentence.image, corpus, _NEIGHBOURS)
            and _reads(tokens, last + 1, one, sentence.image, corpus, _NEIGHBOURS)
        ):
            # Both words stay in the caption: any two such changes make a couple.
            yield ("", ""), sentence.exchanged(first, last), first, last


def _junctions_read(sentence: Sentence, one: Phrase, other: Phrase, corpus: Corpus) -> bool:
    """Whether the exchanged phrases stand between words that follow each other in captions of other images."""
    tokens = ("<", *sentence.tokens, ">")
    return all(
        corpus.seen((tokens[place.first], sentence.tokens[phrase.first]), sentence.image)
        and corpus.seen((sentence.tokens[phrase.last], tokens[place.last + 2]), sentence.image)
        for place, phrase in ((one, other), (other, one))
    )


def _couples(candidates: Sequence[_Candidate], most: int, key: int) -> Iterator[Negative]:
    """Candidates two by two, as the head of this file says; couples of the same words are spread evenly."""
    coherence = _believed(candidates)
    ways: dict[tuple[str, str], list[_Way]] = defaultdict(list)
    for at in permutation(key, len(candidates)).tolist():
        ways[candidates[at].couple].append((candidates[at], coherence[at]))
    used: Counter[int] = Counter()
    made, taken = 0, Counter[tuple[str, str]]()
    pairs = list(dict.fromkeys(min(words, words[::-1]) for words in ways))
    while pairs:
        left = []
        for pair in pairs:
            if taken[pair] >= _MOST_ALIKE and pair != ("", ""):
                continue
            couple = _couple(ways[pair], ways[pair[::-1]], used)
            if couple is None:
                continue
            if made + 2 > most:
                return
            taken[pair] += 1
            made += 2
            yield from couple
            left.append(pair)
        pairs = left


def _couple(one_way: list[_Way], other_way: list[_Way], used: Counter[int]) -> tuple[Negative, Negative] | None:
    """One change each way, of two images, that readers without images cannot tell; None when there are no more.

    What is taken, or finds no partner, leaves its list.
    """
    while one_way:
        one, ours = one_way.pop()
        if used[one.sentence] >= _MOST_OF_CAPTION:
            continue
        partners = [
            (abs(ours + theirs), number)
            for number, (other, theirs) in enumerate(other_way)
            if other.negative.image != one.negative.image
            and other.negative.prior != one.negative.prior
            and used[other.sentence] < _MOST_OF_CAPTION
        ]
        nearest, number = min(partners, default=(math.inf, -1))
        if nearest <= _MOST_INCOHERENT:
            other, _ = other_way.pop(number)
            used.update([one.sentence, other.sentence])
            return one.negative, other.negative
    return None
