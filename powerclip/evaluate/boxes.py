"""The pointing game on a user's own boxes: a JSON file that says which phrase of a caption names what in an image.

    [{"image": "dog.jpg", "caption": "a dog on a red chair", "phrase": "a red chair", "box": [40, 60, 200, 220]},
     {"image": "dog.jpg", "caption": "a dog on a red chair", "phrase": [0, 5], "boxes": [[52, 8, 130, 110]]}]

Images lie beside the file or in `images/`. A phrase is its text, or where it begins and ends in the caption. A box is
left, top, right and bottom in pixels of the image; with {"units": "shares", "items": […]} around the list, in shares
of its width and height.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerclip.data.trees import Span, is_word, shorten
from powerclip.errors import UserError, nearest
from powerclip.evaluate.images import FileImages
from powerclip.evaluate.tasks import Box, PointingGame

UNITS = ("pixels", "shares")
_FAR = 1e9  # largest coordinate of a box; a larger one, or NaN, is an error
_KEYS = ("image", "caption", "phrase", "box", "boxes")


@dataclass(frozen=True)
class _Phrase:
    """A phrase of a caption, and the boxes of what it names."""

    image: Path
    caption: str
    span: Span
    boxes: tuple[Box, ...]
    where: str  # what messages call it


def read_boxes(path: Path) -> PointingGame:
    """The pointing game in a file.

    Raises:
        UserError: a phrase is not in its caption, a box is invalid, or an image is missing; the message names the item.
    """
    units, items = _items(path)
    images = path.parent / "images" if (path.parent / "images").is_dir() else path.parent
    phrases = [_phrase(item, images, f"{path}, item {number}") for number, item in enumerate(items)]
    index = {image: number for number, image in enumerate(dict.fromkeys(phrase.image for phrase in phrases))}
    missing = [image for image in index if not image.is_file()]
    if missing:
        raise UserError(f"{path} names {len(missing):,} images that are not there, the first is {missing[0]}")
    sizes = {image: _size(image) if units == "pixels" else (1.0, 1.0) for image in index}
    return PointingGame(
        FileImages(list(index)),
        [index[phrase.image] for phrase in phrases],
        [phrase.caption for phrase in phrases],
        [phrase.span for phrase in phrases],
        [[_share(box, sizes[phrase.image], phrase.where) for box in phrase.boxes] for phrase in phrases],
    )


def _items(path: Path) -> tuple[str, Sequence[Any]]:
    """The units of the boxes, and the items."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    units, items = "pixels", content
    if isinstance(content, Mapping):
        units, items = content.get("units", "pixels"), content.get("items")
    if units not in UNITS:
        raise UserError(f"{path}: units are {' or '.join(UNITS)}, not {units!r}{nearest(str(units), list(UNITS))}")
    if not isinstance(items, list) or not items:
        raise UserError(f"{path}: expected a list of items with image, caption, phrase and box, or {{'items': […]}}")
    return units, items


def _phrase(item: Any, images: Path, where: str) -> _Phrase:
    if not isinstance(item, Mapping):
        raise UserError(f"{where}: expected image, caption, phrase and box, got {shorten(str(item))}")
    for key in item:
        if key not in _KEYS:
            raise UserError(f"{where}: unknown key {key!r}{nearest(str(key), list(_KEYS))}")
    for key in ("image", "caption"):
        if not isinstance(item.get(key), str) or not item[key].strip():
            raise UserError(f"{where}: {key!r} is missing or no text")
    if ("box" in item) == ("boxes" in item):
        raise UserError(f"{where}: give 'box', or 'boxes' where the phrase names several things")
    boxes = [item["box"]] if "box" in item else item["boxes"]
    if not isinstance(boxes, list) or not boxes:
        raise UserError(f"{where}: 'boxes' must be a list of at least one box")
    caption = item["caption"]
    span = _span(item.get("phrase"), caption, where)
    return _Phrase(images / item["image"], caption, span, tuple(_box(box, where) for box in boxes), where)


def _span(phrase: Any, caption: str, where: str) -> Span:
    if isinstance(phrase, str) and phrase.strip():
        # Not by str.lower, which makes some letters longer: the position would be one in another text.
        wanted = re.compile(re.escape(phrase.strip()), re.IGNORECASE)
        match = wanted.search(caption)
        if match is None:
            raise UserError(f"{where}: the phrase {shorten(phrase)!r} is not in the caption {shorten(caption)!r}")
        if not is_word(match[0]):
            raise UserError(f"{where}: the phrase {shorten(phrase)!r} holds no word")
        if wanted.search(caption, match.start() + 1):
            raise UserError(
                f"{where}: the phrase {shorten(phrase)!r} occurs more than once in the caption: "
                "give its first character and the one after its last instead, such as [0, 5]"
            )
        return Span(match.start(), match.end(), "")
    if isinstance(phrase, list) and len(phrase) == 2 and all(type(edge) is int for edge in phrase):
        start, end = phrase
        if not 0 <= start < end <= len(caption) or not is_word(caption[start:end]):
            raise UserError(f"{where}: the phrase {phrase} holds no word of a caption of {len(caption)} characters")
        return Span(start, end, "")
    raise UserError(f"{where}: 'phrase' must be its text, or where it begins and ends in the caption, got {phrase!r}")


def _box(box: Any, where: str) -> Box:
    numbers = isinstance(box, list) and all(isinstance(side, int | float) and abs(side) <= _FAR for side in box)
    if not numbers or len(box) != 4:
        raise UserError(f"{where}: a box is left, top, right and bottom, got {shorten(str(box))}")
    left, top, right, bottom = map(float, box)
    if left >= right or top >= bottom:
        raise UserError(
            f"{where}: box {box} has no area: left, top, right and bottom are expected, not a width and a height"
        )
    return left, top, right, bottom


def _size(path: Path) -> tuple[float, float] | None:
    """Width and height from the image's header; None for an unreadable image, which is counted when it is embedded."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return float(image.width), float(image.height)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _share(box: Box, size: tuple[float, float] | None, where: str) -> Box:
    """The box in shares of the image, cut at its edges."""
    if size is None:
        return (0.0, 0.0, 1.0, 1.0)
    width, height = size
    left, top, right, bottom = box
    shares = (left / width, top / height, right / width, bottom / height)
    if shares[0] >= 1 or shares[1] >= 1 or shares[2] <= 0 or shares[3] <= 0:
        inside = "an image" if size == (1.0, 1.0) else f"its image of {width:g} × {height:g} pixels"
        raise UserError(f"{where}: box {list(box)} lies outside {inside}")
    x0, y0, x1, y1 = (min(max(side, 0.0), 1.0) for side in shares)
    return x0, y0, x1, y1
