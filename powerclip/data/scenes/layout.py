"""Where the objects of a scene stand, and which spatial relations between them are plain to see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from powerclip.data.scenes.vocabulary import SHAPES, SIZES, Box

# Direction of each relation: the subject lies on this side of the object (y grows downwards).
DIRECTIONS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}

_MARGIN = 0.02  # between an object and the frame
_GAP = 0.04  # between two objects
_DOMINANCE = 1.4  # a relation is said only when its axis outweighs the other this many times
_DOUBT = 0.03  # a relation counts as false only when the displacement is below this
_PLACE = 0.14  # how far off the centre "on the left side" begins


@dataclass(frozen=True)
class SceneObject:
    """One object of a scene; `x`, `y` and `radius` are in widths of the frame."""

    shape: str
    colour: str
    size: str
    pattern: str
    x: float
    y: float
    radius: float

    @cached_property
    def box(self) -> Box:
        """The gold box (x0, y0, x1, y1), in [0, 1]."""
        x0, y0, x1, y1 = SHAPES[self.shape]
        r = self.radius
        return (self.x + r * x0, self.y + r * y0, self.x + r * x1, self.y + r * y1)

    @cached_property
    def centre(self) -> tuple[float, float]:
        """The centre of the box."""
        x0, y0, x1, y1 = self.box
        return ((x0 + x1) / 2, (y0 + y1) / 2)


def place_objects(looks: list[tuple[str, str, str]], rng: Random) -> list[SceneObject]:
    """Objects with these (shape, colour, pattern) looks at random sizes and places, inside the frame, apart."""
    attempt = 0
    while True:
        # A crowded frame may have no room for several large objects: after a few attempts none is drawn.
        sizes = ("small", "medium", "large") if attempt < 3 else ("small", "medium")
        objects = _try_to_place(looks, sizes, rng)
        if objects:
            return objects
        attempt += 1


def _try_to_place(looks: list[tuple[str, str, str]], sizes: tuple[str, ...], rng: Random) -> list[SceneObject]:
    drawn = []
    for look in looks:
        size = rng.choice(sizes)
        low, high = SIZES[size]
        drawn.append((low + (high - low) * rng.random(), size, look))
    placed: dict[int, SceneObject] = {}
    taken: list[Box] = []  # boxes of those, with the gap at their right and below
    # The largest first: it is the hardest to fit. Most scenes try often, so the loop is written out.
    for slot in sorted(range(len(drawn)), key=lambda k: -drawn[k][0]):
        radius, size, (shape, colour, pattern) = drawn[slot]
        x0, y0, x1, y1 = (radius * side for side in SHAPES[shape])
        first_x, first_y = _MARGIN - x0, _MARGIN - y0
        free_x, free_y = 1 - 2 * _MARGIN - (x1 - x0), 1 - 2 * _MARGIN - (y1 - y0)
        for _ in range(12):
            x, y = first_x + free_x * rng.random(), first_y + free_y * rng.random()
            left, top, right, bottom = x + x0, y + y0, x + x1 + _GAP, y + y1 + _GAP
            for other in taken:
                if left < other[2] and other[0] < right and top < other[3] and other[1] < bottom:
                    break
            else:
                taken.append((left, top, right, bottom))
                placed[slot] = SceneObject(shape, colour, size, pattern, x, y, radius)
                break
        else:
            return []
    return [placed[slot] for slot in range(len(drawn))]


def relation_of(a: SceneObject, b: SceneObject) -> str | None:
    """The relation in which `a` plainly stands to `b`, or None when they lie on a diagonal."""
    (ax, ay), (bx, by) = a.centre, b.centre
    dx, dy = bx - ax, by - ay
    if abs(dx) >= _DOMINANCE * abs(dy):
        if a.box[2] <= b.box[0]:
            return "left"
        if b.box[2] <= a.box[0]:
            return "right"
    elif abs(dy) >= _DOMINANCE * abs(dx):
        if a.box[3] <= b.box[1]:
            return "above"
        if b.box[3] <= a.box[1]:
            return "below"
    return None


def place_of(a: SceneObject) -> str | None:
    """The side of the picture on which `a` plainly stands, or None near the centre and in the corners."""
    dx, dy = a.centre[0] - 0.5, a.centre[1] - 0.5
    if max(abs(dx), abs(dy)) < _PLACE:
        return None
    if abs(dx) >= _DOMINANCE * abs(dy):
        return "left" if dx < 0 else "right"
    if abs(dy) >= _DOMINANCE * abs(dx):
        return "above" if dy < 0 else "below"
    return None


def may_hold(kind: str, a: SceneObject, b: SceneObject | None) -> bool:
    """Whether somebody could call `a` left of (…) `b`, or on that side of the picture when `b` is None."""
    sx, sy = DIRECTIONS[kind]
    ax, ay = a.centre
    bx, by = b.centre if b else (0.5, 0.5)
    return sx * (ax - bx) + sy * (ay - by) > _DOUBT
