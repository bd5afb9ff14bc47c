"""The words of the embedded scenes: shapes, colours, sizes, patterns, and the combinations kept out of training."""

from __future__ import annotations

Box = tuple[float, float, float, float]  # x0, y0, x1, y1; y grows downwards

# A shape's bounding box when it is drawn with radius 1 around (0, 0): `shapes.py` draws to fit it.
SHAPES: dict[str, Box] = {
    "circle": (-1.0, -1.0, 1.0, 1.0),
    "square": (-0.88, -0.88, 0.88, 0.88),
    "triangle": (-1.0, -1.0, 1.0, 0.8),
    "star": (-0.951, -1.0, 0.951, 0.809),
    "cross": (-1.0, -1.0, 1.0, 1.0),
    "ring": (-1.0, -1.0, 1.0, 1.0),
    "heart": (-1.0, -0.91, 1.0, 0.95),
    "diamond": (-0.85, -1.0, 0.85, 1.0),
    "moon": (-1.0, -1.0, 0.61, 1.0),
    "arrow": (-0.95, -1.0, 0.95, 1.0),
}

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.12, 0.14),
    "orange": (0.98, 0.52, 0.08),
    "yellow": (0.98, 0.87, 0.14),
    "green": (0.12, 0.62, 0.22),
    "blue": (0.12, 0.30, 0.90),
    "purple": (0.52, 0.16, 0.70),
    "pink": (1.00, 0.52, 0.76),
    "white": (0.97, 0.97, 0.97),
}

# Ranges of the radius, in widths of the frame. The gaps between them keep the words true at a glance;
# "medium" is never said.
SIZES: dict[str, tuple[float, float]] = {
    "small": (0.110, 0.122),
    "medium": (0.152, 0.167),
    "large": (0.205, 0.230),
}
SIZE_WORDS = ("small", "large")

PATTERNS = ("plain", "striped", "dotted", "checkered")

# (colour, shape) pairs that occur in split "zero_shot" only. They close a cycle: each colour comes with two shapes
# and each shape with two colours, so neither the colour nor the shape alone tells the class.
HELD_OUT: tuple[tuple[str, str], ...] = (
    ("red", "circle"),
    ("red", "square"),
    ("green", "square"),
    ("green", "star"),
    ("blue", "star"),
    ("blue", "heart"),
    ("yellow", "heart"),
    ("yellow", "cross"),
    ("purple", "cross"),
    ("purple", "moon"),
    ("white", "moon"),
    ("white", "circle"),
)

SEEN_COLOURS: dict[str, tuple[str, ...]] = {
    shape: tuple(colour for colour in COLOURS if (colour, shape) not in HELD_OUT) for shape in SHAPES
}


def seen(colour: str | None, shape: str) -> bool:
    """Whether training may show this combination; a shape whose colour is not said always may."""
    return colour is None or colour in SEEN_COLOURS[shape]
