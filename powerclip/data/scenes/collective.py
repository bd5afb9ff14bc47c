"""Scenes whose captions name several objects at once: "both stars", "the two red circles", "everything left of …".

Each such phrase has a gold *set* of objects, which is what a best set of regions shall be. They are splits of their own
("collective", "collective_test"), so the scenes of the other splits stay as they are. Two or three objects may look
alike here, and each caption has a phrase for several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import NamedTuple

from powerclip.data.scenes.grammar import Caption, Node, with_period, write
from powerclip.data.scenes.layout import SceneObject, may_hold
from powerclip.data.scenes.vocabulary import SEEN_COLOURS, SHAPES, Box

COLLECTIVE_SPLITS = ("collective", "collective_test")

_NUMBERS = {2: "two", 3: "three"}
_SIDES = {"left": ("left", "of"), "right": ("right", "of"), "above": ("above",), "below": ("below",)}
_PLURALS = {shape: f"{shape}es" if shape.endswith("s") else f"{shape}s" for shape in SHAPES}
_OPENERS = ((), ("a picture of",), ("this picture shows",))
_TAGS = {"a": "DT", "this": "DT", "picture": "NN", "of": "IN", "shows": "VBZ"}


class Collective(NamedTuple):
    """A caption of several phrases, each with the objects that it names."""

    core: Node
    capital: bool
    sets: tuple[tuple[int, ...], ...]  # numbers of objects, for each mention of the caption

    @property
    def said(self) -> Caption:
        """The caption."""
        return write(self.core, capital=self.capital)


def draw_alike(count: int, patterns: Sequence[str], rng: Random) -> list[tuple[str, str, str]]:
    """Shape, colour and pattern of `count` objects, at least two of the same shape, perhaps of the same colour."""
    shape = rng.choice(tuple(SHAPES))
    alike = 3 if count > 3 and rng.random() < 0.3 else 2
    colour = rng.choice(SEEN_COLOURS[shape]) if rng.random() < 0.5 else None
    looks = [(shape, colour or rng.choice(SEEN_COLOURS[shape]), rng.choice(patterns)) for _ in range(alike)]
    while len(looks) < count:
        other = rng.choice(tuple(SHAPES))
        if other != shape:
            looks.append((other, rng.choice(SEEN_COLOURS[other]), rng.choice(patterns)))
    return looks


def draw_collective(objects: Sequence[SceneObject], rng: Random) -> Collective:
    """A caption that is true of these objects: a phrase for several of them, and perhaps one or two further ones."""
    groups = _groups(objects)
    first = rng.choice(groups)
    phrases = [first]
    places = _places(objects, rng)
    if places and rng.random() < 0.6:
        phrases.append(rng.choice(places))
    others = [number for number in range(len(objects)) if number not in first[1]]
    unique = [number for number in others if _is_unique(objects, number)]
    if unique and rng.random() < 0.6:
        number = rng.choice(unique)
        thing = objects[number]
        article = "an" if thing.colour[0] in "aeiou" else "a"
        phrases.append((_noun(article, thing.colour, thing.shape), (number,)))
    rng.shuffle(phrases)
    nodes = [node._replace(mention=k) for k, (node, _) in enumerate(phrases)]
    core = nodes[0] if len(nodes) == 1 else _joined(nodes)
    opener = rng.choice(_OPENERS)
    if opener:
        words = [Node(_TAGS[word], word) for word in opener[0].split()]
        core = Node("NP", "", (*words, core))
    capital, period = rng.random() < 0.5, rng.random() < 0.4
    # Mentions come in the order of the caption, which is that of the phrases.
    return Collective(with_period(core) if period else core, capital, tuple(which for _, which in phrases))


_Phrase = tuple[Node, tuple[int, ...]]  # what is said, and of which objects


def _groups(objects: Sequence[SceneObject]) -> list[_Phrase]:
    """Phrases for all objects of a shape, or of a shape and a colour, where there are two or three."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    for number, thing in enumerate(objects):
        groups.setdefault((thing.shape, None), []).append(number)
        groups.setdefault((thing.shape, thing.colour), []).append(number)
    phrases: list[_Phrase] = []
    for (shape, colour), numbers in groups.items():
        if len(numbers) not in _NUMBERS:
            continue
        words = [*([colour] if colour else []), _PLURALS[shape]]
        phrases.append((_noun("the", _NUMBERS[len(numbers)], *words), tuple(numbers)))
        if len(numbers) == 2:
            phrases.append((_noun("both", *words), tuple(numbers)))
    return phrases


def _places(objects: Sequence[SceneObject], rng: Random) -> list[_Phrase]:
    """Phrases for everything on a side of an object, where it is plain of each other object whether it lies there."""
    phrases: list[_Phrase] = []
    for number, thing in enumerate(objects):
        if not _is_unique(objects, number):
            continue
        others = [k for k in range(len(objects)) if k != number]
        for side in _SIDES:
            beyond = _BEYOND[side]
            there = [k for k in others if beyond(objects[k].box, thing.box)]
            if there and not any(k not in there and may_hold(side, objects[k], thing) for k in others):
                phrases.append((_everything(side, thing.colour, thing.shape), tuple(there)))
    return phrases


@cache
def _everything(side: str, colour: str, shape: str) -> Node:
    """A noun phrase: "everything left of the red box"."""
    where = Node("PP", "", (*(Node("IN", word) for word in _SIDES[side]), _noun("the", colour, shape)))
    return Node("NP", "", (Node("NN", "everything"), where))


# Whether all of one box lies on a side of the other.
_BEYOND: dict[str, Callable[[Box, Box], bool]] = {
    "left": lambda a, b: a[2] <= b[0],
    "right": lambda a, b: a[0] >= b[2],
    "above": lambda a, b: a[3] <= b[1],
    "below": lambda a, b: a[1] >= b[3],
}


def _is_unique(objects: Sequence[SceneObject], number: int) -> bool:
    look = objects[number].shape, objects[number].colour
    return [(thing.shape, thing.colour) for thing in objects].count(look) == 1


@cache
def _noun(first: str, *words: str) -> Node:
    """A noun phrase: "the two red circles"."""
    tags = [("CD" if word in _NUMBERS.values() else "JJ", word) for word in words[:-1]]
    last = "NNS" if words[-1] in _PLURALS.values() else "NN"
    return Node("NP", "", (Node("DT", first), *(Node(tag, word) for tag, word in tags), Node(last, words[-1])))


def _joined(nodes: Sequence[Node]) -> Node:
    parts: list[Node] = [nodes[0]]
    for node in nodes[1:-1]:
        parts += [Node(",", ","), node]
    return Node("NP", "", (*parts, Node("CC", "and"), nodes[-1]))
