"""From captions and trees to hard negatives that a reader without the image cannot tell.

Five kinds, by SugarCrepe's names: `replace_obj` (a noun), `replace_att` (an attribute of one), `replace_rel` (a
preposition), each by one of its kind from other captions; `swap_obj` (two noun phrases exchanged) and `swap_att` (the
attributes of two). A change is kept where

- it reads as a sentence of the corpus could: each three words around the change follow each other in captions of other
  images, a noun keeps its number;
- it is not still true, by the captions' own evidence: the new word is in no caption of the image, and the two words
  exclude each other (`Exclusion`).

**Couples.** Negatives come in couples: a caption whose "dog" becomes "cat" with one whose "cat" becomes "dog"; one that
names the man before the dog with one that names the dog before the man. A model that reads only the changed words, and
no image, is right in exactly one of the two. And of each couple a model of five words (`Corpus.log_probability`), which
reads the words around them as well, is right in one.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

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
_MOST_ALIKE = 40  # couples of the same two words
_MOST_OF_CAPTION = 3  # negatives of a kind from one caption
_ROLES: dict[str, Role] = {"replace_obj": "noun", "replace_att": "attribute", "replace_rel": "preposition"}
# Two words exclude each other when both are said of an image at most this share as often as by chance, and chance
# would have them together in at least that many images.
_MOST_TOGETHER = {"noun": 0.45, "attribute": 0.5, "preposition": 0.2}
_LEAST_EXPECTED = {"noun": 3.0, "attribute": 1.0, "preposition": 2.0}
# Two words are of a kind when the places in which they stand have this cosine ("field" and "hill", "black" and "red").
_LEAST_ALIKE = {"noun": 0.34, "attribute": 0.2, "preposition": 0.0}
# Words around a new one that must be seen with it, from and to which place: of a replaced word, and of exchanged ones.
_AROUND = ((-2, 0), (-1, 1), (0, 2))
_NEIGHBOURS = ((-1, 0), (0, 1))
# Prepositions that say too little to be false, or that have no place as their meaning.
_VAGUE_TEXT = """
    of with for like to at by near from during full around after before as than
"""
_VAGUE = frozenset(_VAGUE_TEXT.split())
# Words that are singular and go with "are", or name a part of the rest: exchanged, they seldom read well.
_COLLECTIVE_TEXT = """
    couple group crowd family team bunch pair lot number side top front middle back
"""
_COLLECTIVE = frozenset(_COLLECTIVE_TEXT.split())
_PRONOUNS_TEXT = """
    he she it his her hers its him himself herself itself they their them themselves
"""
_PRONOUNS = frozenset(_PRONOUNS_TEXT.split())
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
            is_new = kind.startswith("swap") or couple[1] not in said[sentence.image]
            if is_new and " ".join(tokens) not in texts[sentence.image]:
                # The tokens of a change are as many as those that it replaces: both sides have the same words around.
                truth = corpus.log_probability(sentence.tokens, sentence.image, first, last)
                prior = truth > corpus.log_probability(tokens, sentence.image, first, last)
                negative = Negative(sentence.image, kind, sentence.text, text, prior)
                found[kind].append(_Candidate(couple, number, negative))
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
            if other == word or other in _VAGUE or (role == "noun" and not _agree(word, other)):
                continue
            if (
                corpus.alike(word, other) >= _LEAST_ALIKE[role]
                and _reads(tokens, at + 1, other, sentence.image, corpus, _AROUND)
                and _excludes(role, word, other, corpus)
            ):
                yield (word, other), sentence.replaced(at, other), at, at


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
        if tokens[one.first : one.last + 1] == tokens[other.first : other.last + 1]:
            continue
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
    shuffled = [candidates[at] for at in permutation(key, len(candidates)).tolist()]
    groups: dict[tuple[tuple[str, str], bool], list[_Candidate]] = defaultdict(list)
    for candidate in shuffled:
        groups[candidate.couple, candidate.negative.prior].append(candidate)
    used: Counter[int] = Counter()
    made, taken = 0, Counter[tuple[str, str]]()
    pairs = list(dict.fromkeys(min(one.couple, one.couple[::-1]) for one in shuffled))
    while pairs:
        left = []
        for pair in pairs:
            couple = _couple(groups, pair, used) if taken[pair] < _MOST_ALIKE or pair == ("", "") else None
            if couple is None:
                continue
            if made + 2 > most:
                return
            taken[pair] += 1
            made += 2
            yield from (candidate.negative for candidate in couple)
            left.append(pair)
        pairs = left


def _couple(
    groups: dict[tuple[tuple[str, str], bool], list[_Candidate]], pair: tuple[str, str], used: Counter[int]
) -> tuple[_Candidate, _Candidate] | None:
    """One change each way, of two images, the model of five words right in one of them; None when there are no more."""
    for prior in (True, False):
        ways = [groups[pair, prior], groups[pair[::-1], not prior]]
        for way in ways:
            while way and used[way[-1].sentence] >= _MOST_OF_CAPTION:
                way.pop()
        if all(ways):
            one = ways[0].pop()
            fitting = next((at for at in range(len(ways[1])) if ways[1][at].negative.image != one.negative.image), None)
            if fitting is not None:
                other = ways[1].pop(fitting)
                used.update([one.sentence, other.sentence])
                return one, other
    return None
