"""Scenes drawn from numbers: the same (seed, split, index) gives the same objects and the same caption everywhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from random import Random

from powerclip.data.scenes.background import Background, draw_background
from powerclip.data.scenes.collective import COLLECTIVE_SPLITS, Collective, draw_alike, draw_collective
from powerclip.data.scenes.grammar import Caption, Mention, Plan, Relation, Wording, add_outline, compose, realise
from powerclip.data.scenes.layout import SceneObject, place_objects, place_of, relation_of
from powerclip.data.scenes.vocabulary import HELD_OUT, SEEN_COLOURS, SHAPES, SIZE_WORDS, Box
from powerclip.data.trees import Span, Tree, tree_from_spans
from powerclip.errors import UserError, nearest

SPLITS = ("train", "test", "zero_shot", *COLLECTIVE_SPLITS)

_SHAPES = tuple(SHAPES)
_COUNTS = (1, 2, 2, 2, 3, 3, 3, 4, 4)  # objects in an image
# Chance that a caption says the pattern. Half of the objects' patterns are plain, which is said a third as often:
# each pattern is said equally often, so that the word alone does not betray a hard negative.
_PATTERN_DRAW = ("plain", "plain", "plain", "striped", "dotted", "checkered")
_SAY_PATTERN = {"plain": 0.18, "striped": 0.54, "dotted": 0.54, "checkered": 0.54}
_SAY_SIZE = 0.55
_SAY_COLOUR = 0.85
_FORMS = ("noun", "noun", "is", "is", "relative", "fronted")


_NO_PLAN = Plan("list", (), (), Wording(0, 0, 0, (0, 0), "noun", False, False, False))


@dataclass(frozen=True)
class Scene:
    """An image to be drawn (`render`) with a caption that is true of it."""

    seed: int
    split: str
    index: int
    objects: tuple[SceneObject, ...]
    background: Background
    plan: Plan  # empty where the caption is a collective one
    collective: Collective | None = None

    @property
    def key(self) -> str:
        """A name for the scene, the same in every run."""
        return f"{self.split}-{self.seed}-{self.index:08d}"

    @cached_property
    def _said(self) -> Caption:
        return self.collective.said if self.collective else realise(self.plan)

    @property
    def caption(self) -> str:
        """The caption."""
        return self._said.text

    @property
    def brackets(self) -> str:
        """The caption's gold tree, Penn style with part-of-speech tags."""
        return self._said.brackets

    @cached_property
    def tree(self) -> Tree:
        """The caption's gold tree."""
        return tree_from_spans([Span(*phrase) for phrase in self._said.phrases], self.caption)

    def add_outline(self, words: list[str], ranges: list[tuple[int, int]]) -> None:
        """Add the caption's words, marks among them and in lower case, and its phrases as ranges of all words."""
        add_outline(self.collective.core if self.collective else compose(self.plan), words, ranges)

    @cached_property
    def mentioned(self) -> tuple[SceneObject, ...]:
        """The object of each mention of the plan: a caption may leave objects out, and orders them as it likes."""
        # Generation stores the objects in the order of their mentions.
        return self.objects[: len(self.plan.mentions)]

    @cached_property
    def phrase_sets(self) -> tuple[tuple[Span, tuple[Box, ...]], ...]:
        """The span and the gold boxes of each noun phrase that names one object or several, in the caption's order."""
        sets = self.collective.sets if self.collective else [(k,) for k in range(len(self.mentioned))]
        return tuple(
            (Span(start, end, label), tuple(self.objects[k].box for k in sets[mention]))
            for start, end, label, mention in self._said.mentions
        )

    @property
    def phrase_boxes(self) -> tuple[tuple[Span, Box], ...]:
        """The span and the gold box of each noun phrase that names one object, in the order of the caption."""
        return tuple((span, boxes[0]) for span, boxes in self.phrase_sets if len(boxes) == 1)


def generate(seed: int, index: int, split: str = "train") -> Scene:
    """The scene with this number."""
    if split not in SPLITS:
        raise UserError(f"scenes have no split {split!r}{nearest(split, list(SPLITS))}: use one of {', '.join(SPLITS)}")
    rng = Random(f"{seed}/{split}/{index}")
    if split in COLLECTIVE_SPLITS:
        looks = draw_alike(rng.choice((3, 4, 4)), _PATTERN_DRAW, rng)
        things = place_objects(looks, rng)
        caption = draw_collective(things, rng)
        return Scene(seed, split, index, tuple(things), draw_background(things, rng), _NO_PLAN, caption)
    if split == "zero_shot":
        colour, shape = HELD_OUT[index % len(HELD_OUT)]
        looks = [(shape, colour, rng.choice(_PATTERN_DRAW))]
    else:
        looks = _draw_looks(rng.choice(_COUNTS), rng)
    objects = place_objects(looks, rng)
    count = len(objects)
    if count > 2 and rng.random() < 0.2:
        count -= 1
    order, plan = _draw_plan(objects, count, rng)
    ordered = tuple(objects[k] for k in order) + tuple(o for k, o in enumerate(objects) if k not in order)
    return Scene(seed, split, index, ordered, draw_background(ordered, rng), plan)


def scene_batch(indices: Iterable[int], seed: int, split: str = "train") -> list[Scene]:
    """The scenes with these numbers."""
    return [generate(seed, index, split) for index in indices]


def test_scenes(count: int, seed: int) -> list[Scene]:
    """The first `count` scenes of split "test" whose captions all differ, whatever their capitals and full stops."""
    scenes: dict[str, Scene] = {}
    index = 0
    while len(scenes) < count:
        scene = generate(seed, index, "test")
        scenes.setdefault(scene.caption.lower().rstrip("."), scene)
        index += 1
    return list(scenes.values())


test_scenes.__test__ = False  # type: ignore[attr-defined]  # pytest would take the name for a test


def zero_shot_classes() -> list[str]:
    """The names of the zero-shot classes: "red circle", …"""
    return [f"{colour} {shape}" for colour, shape in HELD_OUT]


def zero_shot_label(scene: Scene) -> int:
    """The class of a scene of split "zero_shot"."""
    only = scene.objects[0]
    return HELD_OUT.index((only.colour, only.shape))


def _draw_looks(count: int, rng: Random) -> list[tuple[str, str, str]]:
    """Shape, colour and pattern of each object; no two share both shape and colour."""
    looks: list[tuple[str, str, str]] = []
    taken: set[tuple[str, str]] = set()
    while len(looks) < count:
        shape = rng.choice(_SHAPES)
        colour = rng.choice(SEEN_COLOURS[shape])
        if (shape, colour) not in taken:
            taken.add((shape, colour))
            looks.append((shape, colour, rng.choice(_PATTERN_DRAW)))
    return looks


def _mention(thing: SceneObject, objects: list[SceneObject], rng: Random) -> Mention:
    # A lone object is described more closely, or many pictures would share its caption. The shape alone may name an
    # object only where no other has that shape.
    zeal = 1.6 if len(objects) == 1 else 1.0
    may_omit = len(objects) > 1 and sum(other.shape == thing.shape for other in objects) == 1
    colour = None if may_omit and rng.random() > _SAY_COLOUR else thing.colour
    size = thing.size if thing.size in SIZE_WORDS and rng.random() < zeal * _SAY_SIZE else None
    pattern = thing.pattern if rng.random() < zeal * _SAY_PATTERN[thing.pattern] else None
    return Mention(thing.shape, colour, size, pattern, rng.random() < 0.4)


def _draw_plan(objects: list[SceneObject], count: int, rng: Random) -> tuple[list[int], Plan]:
    """What to say of `count` of the objects: which of them, in the order of their mentions, and the plan."""
    mentioned = rng.sample(range(len(objects)), count)
    frame, order, links = _draw_frame(objects, mentioned, rng)
    mentions = tuple(_mention(objects[k], objects, rng) for k in order)
    position = {k: number for number, k in enumerate(order)}
    relations = tuple(Relation(position[a], kind, None if b is None else position[b]) for a, kind, b in links)
    wording = Wording(
        opener=rng.randrange(60),
        verb=rng.randrange(60),
        joint=rng.randrange(60),
        relations=(rng.randrange(60), rng.randrange(60)),
        form=rng.choice(_FORMS),
        # "three objects: …" must not be said of a picture with four.
        counted=1 < count == len(objects) and rng.random() < 0.4,
        capital=rng.random() < 0.5,
        period=rng.random() < 0.4,
    )
    return order, Plan(frame, mentions, relations, wording)


Link = tuple[int, str, int | None]  # subject, kind, target: numbers of objects, before mentions are numbered


def _draw_frame(objects: list[SceneObject], mentioned: list[int], rng: Random) -> tuple[str, list[int], list[Link]]:
    """A frame, the objects in the order in which it mentions them, and the relations that it states."""
    related: dict[tuple[int, int], str] = {}
    for a in mentioned:
        for b in mentioned:
            kind = relation_of(objects[a], objects[b]) if a != b else None
            if kind:
                related[a, b] = kind
    if not related or rng.random() < 0.15:
        side = place_of(objects[mentioned[0]])
        if side and rng.random() < (0.9 if len(mentioned) == 1 else 0.3):
            return "pair", mentioned, [(mentioned[0], side, None)]
        return "list", mentioned, []
    a, b = rng.choice(list(related))
    first: Link = (a, related[a, b], b)
    rest = [k for k in mentioned if k not in (a, b)]
    options: list[tuple[str, list[int], list[Link]]] = []
    for c in rest:
        if (a, c) in related:
            options.append(("fork", [a, b, c], [first, (a, related[a, c], c)]))
        if (b, c) in related:
            options.append(("chain", [a, b, c], [first, (b, related[b, c], c)]))
        for target in (a, b):
            if (c, target) in related:
                options.append(("clauses", [a, b, c], [first, (c, related[c, target], target)]))
        for d in rest:
            if (c, d) in related:
                options.append(("clauses", [a, b, c, d], [first, (c, related[c, d], d)]))
        side = place_of(objects[c])
        if side:
            options.append(("clauses", [a, b, c], [first, (c, side, None)]))
    if not options or rng.random() < 0.25:
        options = [("pair", [a, b], [first])]
    frame, order, links = rng.choice(options)
    return frame, order + [k for k in rest if k not in order], links
