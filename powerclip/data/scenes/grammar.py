"""English for a scene: a plan of what to say becomes a caption and its Penn-style tree at once.

Text and brackets come from one structure, so the gold tree is right by construction, and a hard negative is the
caption of a changed plan: same grammar, same wording.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


class Mention(NamedTuple):
    """What a caption says of one object; None where it says nothing."""

    shape: str
    colour: str | None
    size: str | None
    pattern: str | None
    pattern_last: bool = False  # "a red striped star" rather than "a striped red star"


class Relation(NamedTuple):
    """Mention `subject` lies left of (right of, above, below) mention `target`; None: on that side of the picture."""

    subject: int
    kind: str
    target: int | None


class Wording(NamedTuple):
    """Choices that change the words but not the meaning; a number picks among the options of its place, modulo."""

    opener: int
    verb: int
    joint: int
    relations: tuple[int, int]
    form: str  # of the clause: "noun", "is", "relative", "fronted"
    counted: bool  # a list opens with its number: "three objects: …"
    capital: bool
    period: bool


class Plan(NamedTuple):
    """What a caption says: the frame takes its mentions from the front, the rest is added at the end.

    Frames: "list" (all mentions, no relation) · "pair" (0 r 1, or 0 on a side of the picture) · "fork" (0 r 1 and
    0 r' 2) · "chain" (0 r 1, which is r' 2) · "clauses" (0 r 1, and 2 r' another).
    """

    frame: str
    mentions: tuple[Mention, ...]
    relations: tuple[Relation, ...]
    wording: Wording


class Node(NamedTuple):
    """A constituent: either a tag over a word or a phrase over children."""

    label: str
    word: str
    children: tuple[Node, ...] = ()
    mention: int = -1  # the mention that this noun phrase is, if any


@dataclass(frozen=True)
class Caption:
    """A caption, its bracketed tree, and for each object noun phrase (start, end, label, mention).

    `phrases` has (start, end, label) of every constituent, the higher ones first: the tree without its brackets.
    """

    text: str
    brackets: str
    mentions: tuple[tuple[int, int, str, int], ...]
    phrases: tuple[tuple[int, int, str], ...]


def _words(*tagged: str) -> tuple[Node, ...]:
    """Leaves from "TAG word" strings."""
    leaves = []
    for item in tagged:
        tag, word = item.split(" ")
        leaves.append(Node(tag, word))
    return tuple(leaves)


def _phrase(label: str, *children: Node) -> Node:
    return Node(label, "", children)


_COMMA, _PERIOD, _COLON = _words(", ,", ". .", ": :")
_THE, _AND, _OF = _words("DT the", "CC and", "IN of")
_THAT = _phrase("WHNP", *_words("WDT that"))
_THERE = _phrase("NP", *_words("EX there"))
_NUMBERS = {2: "two", 3: "three", 4: "four"}
_COUNTED = ("objects", "shapes", "things", "figures")

_PICTURES = tuple(
    _phrase("NP", *_words(*words))
    for words in (
        ("DT a", "NN picture"),
        ("DT an", "NN image"),
        ("DT a", "NN drawing"),
        ("DT this", "NN picture"),
        ("DT the", "NN image"),
    )
)
_VERBS = _words("VBZ is", "VBZ sits", "VBZ lies", "VBZ appears")
_ADDITIONS = (
    _words("RP along", "IN with"),
    _words("RB together", "IN with"),
    _words("RB as", "RB well", "IN as"),
)
_JOINTS = _words("CC and", "IN while", "CC and")

# Every kind has the same number of wordings, so that a replaced relation is worded like a true one.
_SIDES = {
    "left": ("NN left", "JJ left"),
    "right": ("NN right", "JJ right"),
    "above": ("NN top", "JJ upper"),
    "below": ("NN bottom", "JJ lower"),
}
_PREPOSITIONS = {
    "above": _words("IN above", "IN over", "JJR higher"),
    "below": _words("IN below", "IN under", "JJR lower"),
}


def _noun_phrase(plan: Plan, k: int) -> Node:
    """The first mention of an object: "a small striped red star"."""
    return _described(plan.mentions[k], k)


@cache
def _described(mention: Mention, k: int) -> Node:
    shape, colour, size, pattern, pattern_last = mention
    looks = (colour, pattern) if pattern_last and pattern != "plain" else (pattern, colour)
    adjectives = [word for word in (size, *looks) if word]
    first = adjectives[0] if adjectives else shape
    article = Node("DT", "an" if first[0] in "aeiou" else "a")
    return Node("NP", "", (article, *(Node("JJ", word) for word in adjectives), Node("NN", shape)), k)


def _again(plan: Plan, k: int) -> Node:
    """A later mention: "the star", with its colour where another star is about."""
    shape, colour, *_ = plan.mentions[k]
    unique = sum(mention.shape == shape for mention in plan.mentions) == 1
    adjectives = () if unique or colour is None else (Node("JJ", colour),)
    return Node("NP", "", (_THE, *adjectives, Node("NN", shape)), k)


def _where(plan: Plan, which: int, target: Node | None) -> Node:
    """The phrase of a relation: "to the left of …", "above …", "in the upper half of the picture"."""
    kind = plan.relations[which].kind
    wording = plan.wording.relations[which] % 3
    noun, adjective = _SIDES[kind]
    if target is None:
        picture = _phrase("PP", _OF, _phrase("NP", _THE, Node("NN", "picture")))
        if wording == 0:
            side = _phrase("NP", _THE, *_words(adjective), Node("NN", "half"))
            return _phrase("PP", Node("IN", "in"), _phrase("NP", side, picture))
        side = _phrase("NP", _THE, *_words(noun))
        start = "toward" if wording == 1 else "at"
        return _phrase("PP", Node("IN", start), _phrase("NP", side, picture))
    if kind in ("left", "right"):
        of = _phrase("PP", _OF, target)
        if wording == 0:
            return _phrase("ADJP", *_words(adjective), of)
        side = _phrase("NP", _phrase("NP", _THE, *_words(noun)), of)
        return _phrase("PP", Node("IN", "to" if wording == 1 else "on"), side)
    head = _PREPOSITIONS[kind][wording]
    if wording == 2:
        return _phrase("ADJP", head, _phrase("PP", Node("IN", "than"), target))
    return _phrase("PP", head, target)


def _list(items: list[Node], conjunction: Node = _AND) -> Node:
    """One noun phrase for several: "A, B and C"."""
    if len(items) == 1:
        return items[0]
    parts = [items[0]]
    for item in items[1:-1]:
        parts += [_COMMA, item]
    return _phrase("NP", *parts, conjunction, items[-1])


def _sentence(plan: Plan, subject: Node, where: Node, shift: int = 0) -> Node:
    verb = _VERBS[(plan.wording.verb + shift) % len(_VERBS)]
    return _phrase("S", subject, _phrase("VP", verb, where))


def _which_is(plan: Plan, head: Node, where: Node) -> Node:
    """A noun phrase with a relative clause: "a star that sits above a ring"."""
    verb = _VERBS[plan.wording.verb % len(_VERBS)]
    return _phrase("NP", head, _phrase("SBAR", _THAT, _phrase("S", _phrase("VP", verb, where))))


def _open(plan: Plan, noun: Node, plural: bool) -> Node:
    """An opening for a caption that is a noun phrase: "a picture of …", "there is …", or none."""
    choice = plan.wording.opener % 10
    be = Node("VBP", "are") if plural else Node("VBZ", "is")
    if choice < 3:
        return _phrase("NP", _PICTURES[choice], _phrase("PP", _OF, noun))
    if choice == 3:
        return _phrase("S", _THERE, _phrase("VP", be, noun))
    if choice == 4:
        return _phrase("S", _phrase("ADVP", Node("RB", "here")), _phrase("VP", be, noun))
    if choice < 7:
        return _phrase("S", _PICTURES[choice - 2], _phrase("VP", Node("VBZ", "shows"), noun))
    return noun


def _clause(plan: Plan, subject: Node, where: Node) -> Node:
    form = plan.wording.form
    if form == "is":
        return _sentence(plan, subject, where)
    if form == "fronted":
        return _phrase("SINV", where, _phrase("VP", _VERBS[plan.wording.verb % 3]), subject)
    if form == "relative":
        return _open(plan, _which_is(plan, subject, where), plural=False)
    return _open(plan, _phrase("NP", subject, where), plural=False)


def _core(plan: Plan) -> tuple[Node, int]:
    """The frame's constituent and how many mentions it took."""
    frame, mentions, relations, wording = plan
    if frame == "list":
        count = len(mentions)
        items = _list([_noun_phrase(plan, k) for k in range(count)])
        if wording.counted and count > 1:
            noun = _COUNTED[wording.opener % len(_COUNTED)]
            head = _phrase("NP", Node("CD", _NUMBERS[count]), Node("NNS", noun))
            return _phrase("NP", head, _COLON, items), count
        return _open(plan, items, plural=count > 1), count
    subject = _noun_phrase(plan, 0)
    if frame == "pair":
        target = relations[0].target
        where = _where(plan, 0, None if target is None else _noun_phrase(plan, target))
        return _clause(plan, subject, where), 1 if target is None else 2
    if frame == "fork":
        both = [_where(plan, k, _noun_phrase(plan, k + 1)) for k in range(2)]
        return _clause(plan, subject, _phrase("PP", both[0], _AND, both[1])), 3
    if frame == "chain":
        inner = _which_is(plan, _noun_phrase(plan, 1), _where(plan, 1, _noun_phrase(plan, 2)))
        return _clause(plan, subject, _where(plan, 0, inner)), 3
    first = _sentence(plan, subject, _where(plan, 0, _noun_phrase(plan, 1)))
    target = relations[1].target
    other = None if target is None else _noun_phrase(plan, target) if target > 2 else _again(plan, target)
    second = _sentence(plan, _noun_phrase(plan, 2), _where(plan, 1, other), shift=wording.joint)
    joint = _JOINTS[wording.joint % len(_JOINTS)]
    return _phrase("S", first, _COMMA, joint, second), 4 if target == 3 else 3


def _add(plan: Plan, core: Node, extras: list[Node]) -> Node:
    """The mentions that the frame left over, at the end: "…, along with a ring and a moon"."""
    choice = plan.wording.joint % 3
    return _phrase(core.label, core, _COMMA, _phrase("PP", *_ADDITIONS[choice], _list(extras)))


def realise(plan: Plan) -> Caption:
    """The caption of a plan, with its tree and the character spans of its object noun phrases."""
    return write(compose(plan), capital=plan.wording.capital)


def compose(plan: Plan) -> Node:
    """The caption of a plan as one constituent."""
    core, taken = _core(plan)
    if taken < len(plan.mentions):
        core = _add(plan, core, [_noun_phrase(plan, k) for k in range(taken, len(plan.mentions))])
    return with_period(core) if plan.wording.period else core


def with_period(core: Node) -> Node:
    """A constituent with a full stop."""
    # The mark joins the topmost phrase, as treebanks have it; an object's own noun phrase stays clear of it.
    inside = core.children if core.mention < 0 else (core,)
    return _phrase(core.label, *inside, _PERIOD)


def add_outline(node: Node, words: list[str], ranges: list[tuple[int, int]]) -> None:
    """Add the words of a constituent, marks among them, and each of its phrases as a range of all words."""
    if node.word:
        words.append(node.word)
        return
    first = len(words)
    for child in node.children:
        add_outline(child, words, ranges)
    ranges.append((first, len(words)))


def write(core: Node, *, capital: bool) -> Caption:
    """A constituent as a caption."""
    text: list[str] = []
    brackets: list[str] = []
    spans: list[tuple[int, int, str, int]] = []
    phrases: list[tuple[int, int, str]] = []
    length = 0

    def add(node: Node) -> None:
        nonlocal length
        if node.word:
            word = node.word
            if not text:
                word = word.capitalize() if capital else word
            elif word not in ",.:":
                text.append(" ")
                length += 1
            text.append(word)
            length += len(word)
            brackets.append(f"({node.label} {word})")
            return
        # The separating space is written by the first word below, so the phrase starts one character later.
        start = length + 1 if text else 0
        brackets.append(f"({node.label}")
        place = len(phrases)
        phrases.append((0, 0, ""))  # keeps the place of a higher phrase before those inside
        for child in node.children:
            add(child)
        brackets.append(")")
        phrases[place] = (start, length, node.label)
        if node.mention >= 0:
            spans.append((start, length, node.label, node.mention))

    add(core)
    return Caption("".join(text), " ".join(brackets).replace(" )", ")"), tuple(spans), tuple(phrases))
