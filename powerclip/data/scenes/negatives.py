"""Hard negatives of SugarCrepe's seven kinds: captions one change away from the truth, and false of the picture.

A negative is the caption of a changed plan, worded like the true one; the new combinations of colour and shape are
ones that training shows, and a changed word comes from the same vocabulary. So the text alone does not tell which of
the two is true; only `add_*` are longer, by their nature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, combinations, cycle, permutations
from random import Random
from typing import TYPE_CHECKING

from powerclip.data.scenes.grammar import Mention, Plan, realise
from powerclip.data.scenes.layout import DIRECTIONS, SceneObject, may_hold
from powerclip.data.scenes.vocabulary import COLOURS, PATTERNS, SEEN_COLOURS, SHAPES, SIZE_WORDS, seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from powerclip.data.scenes.scene import Scene

_MOST_MENTIONS = 4
_WORDS: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "size": SIZE_WORDS,
    "pattern": PATTERNS,
}
# Size and pattern of an added object: said about as often as true captions say them.
_ADDED_LOOKS: tuple[tuple[str | None, str | None], ...] = (
    (None, None),
    ("small", None),
    (None, "striped"),
    (None, None),
    ("large", None),
    (None, "plain"),
    (None, None),
    ("small", "dotted"),
    (None, None),
    ("large", "checkered"),
    (None, None),
)


def may_be_true(plan: Plan, objects: Sequence[SceneObject]) -> bool:
    """Whether some reading of the plan could pass as true of a picture with these objects.

    A reading gives each mention an object of its own. Relations are judged leniently, so what this calls false
    is plainly false.
    """
    return any(
        all(map(_fits, plan.mentions, reading))
        and all(may_hold(kind, reading[a], None if b is None else reading[b]) for a, kind, b in plan.relations)
        for reading in permutations(objects, len(plan.mentions))
    )


def hard_negatives(scene: Scene) -> dict[str, str]:
    """One false caption of each kind that applies to the scene; the same ones every time."""
    rng = Random(f"negatives/{scene.seed}/{scene.split}/{scene.index}")
    negatives = {}
    for kind, changes in _KINDS.items():
        groups = list(changes(scene.plan))
        rng.shuffle(groups)
        for group in groups:
            rng.shuffle(group)
        for plan in chain.from_iterable(groups):
            if _sayable(plan) and not may_be_true(plan, scene.objects):
                negatives[kind] = realise(plan).text
                break
    return negatives


def _fits(mention: Mention, thing: SceneObject) -> bool:
    return (
        mention.shape == thing.shape
        and mention.colour in (None, thing.colour)
        and mention.size in (None, thing.size)
        and mention.pattern in (None, thing.pattern)
    )


def _sayable(plan: Plan) -> bool:
    """Whether a true caption could be this: seen combinations, and mentions that tell the objects apart."""
    mentions = plan.mentions
    if not all(seen(mention.colour, mention.shape) for mention in mentions):
        return False
    for k, one in enumerate(mentions):
        for other in mentions[k + 1 :]:
            if one.shape == other.shape and (None in (one.colour, other.colour) or one.colour == other.colour):
                return False
    return True


def _with(plan: Plan, changed: dict[int, Mention]) -> Plan:
    return plan._replace(mentions=tuple(changed.get(k, mention) for k, mention in enumerate(plan.mentions)))


def _set(mention: Mention, name: str, word: str) -> Mention:
    return mention._replace(**{name: word})  # type: ignore[arg-type]  # `name` is one of _WORDS, all of them str


# Each kind of change yields groups of changed plans. A group is drawn first and a plan from it second, so that an
# attribute with many words (colour) is not changed more often than one with few (size).


def _replace_obj(plan: Plan) -> Iterator[list[Plan]]:
    for k, mention in enumerate(plan.mentions):
        yield [_with(plan, {k: mention._replace(shape=shape)}) for shape in SHAPES if shape != mention.shape]


def _replace_att(plan: Plan) -> Iterator[list[Plan]]:
    for k, mention in enumerate(plan.mentions):
        for name, words in _WORDS.items():
            said = getattr(mention, name)
            if said:
                yield [_with(plan, {k: _set(mention, name, word)}) for word in words if word != said]


def _replace_rel(plan: Plan) -> Iterator[list[Plan]]:
    for k, relation in enumerate(plan.relations):
        before, after = plan.relations[:k], plan.relations[k + 1 :]
        yield [
            plan._replace(relations=(*before, relation._replace(kind=kind), *after))
            for kind in DIRECTIONS
            if kind != relation.kind
        ]


def _swap_obj(plan: Plan) -> Iterator[list[Plan]]:
    for (k, one), (j, other) in combinations(enumerate(plan.mentions), 2):
        yield [_with(plan, {k: other, j: one})]


def _swap_att(plan: Plan) -> Iterator[list[Plan]]:
    for (k, one), (j, other) in combinations(enumerate(plan.mentions), 2):
        for name in _WORDS:
            a, b = getattr(one, name), getattr(other, name)
            if a and b and a != b:
                yield [_with(plan, {k: _set(one, name, b), j: _set(other, name, a)})]


def _add_obj(plan: Plan) -> Iterator[list[Plan]]:
    if len(plan.mentions) < _MOST_MENTIONS:
        combinations_seen = [(colour, shape) for shape, colours in SEEN_COLOURS.items() for colour in colours]
        yield [
            plan._replace(mentions=(*plan.mentions, Mention(shape, colour, size, pattern)))
            for (colour, shape), (size, pattern) in zip(combinations_seen, cycle(_ADDED_LOOKS), strict=False)
        ]


def _add_att(plan: Plan) -> Iterator[list[Plan]]:
    for k, mention in enumerate(plan.mentions):
        for name, words in _WORDS.items():
            if getattr(mention, name) is None:
                yield [_with(plan, {k: _set(mention, name, word)}) for word in words]


_KINDS: dict[str, Callable[[Plan], Iterator[list[Plan]]]] = {
    "replace_obj": _replace_obj,
    "replace_att": _replace_att,
    "replace_rel": _replace_rel,
    "swap_obj": _swap_obj,
    "swap_att": _swap_att,
    "add_obj": _add_obj,
    "add_att": _add_att,
}
NEGATIVE_KINDS = tuple(_KINDS)
