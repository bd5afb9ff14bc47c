"""Phrases and boxes in the style of Flickr30k Entities: JSON lines, one caption each, beside tars or folders of images.

    {"key": "1000268201", "caption": "a dog on two chairs", "phrases": [
      {"start": 0, "end": 5, "boxes": [[0.1, 0.2, 0.4, 0.6]]},
      {"start": 9, "end": 19, "boxes": [[0.0, 0.5, 0.5, 1.0], [0.5, 0.5, 1.0, 1.0]]}]}

A key is an image's file name up to its first dot. A phrase is where it begins and ends in the caption; a box is left,
top, right and bottom in shares of the image's sides. Other entries, such as `entity` and `kind`, are not read.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerclip.data.trees import Span, is_word, shorten
from powerclip.errors import UserError
from powerclip.evaluate.images import find_images, image_source
from powerclip.evaluate.tasks import Box, Grounding, PointingGame


@dataclass(frozen=True)
class _Caption:
    """One line."""

    key: str
    text: str
    phrases: Sequence[tuple[Span, list[Box]]]


def read_entities(path: Path, images: Sequence[Path]) -> Grounding:
    """The phrases in a .jsonl or .jsonl.gz file, with their images from tars, or from folders of tars or images.

    Captions whose image is not there are counted and left out.

    Raises:
        UserError: a line is not as expected, a phrase lies outside of its caption, a box has no area, or no image is
            there; the message names the line.
    """
    captions = [_caption(line, f"{path}, line {number}") for number, line in _lines(path)]
    members = find_images(images, {caption.key for caption in captions})
    kept = [caption for caption in captions if caption.key in members]
    phrases = [(number, span, boxes) for number, one in enumerate(kept) for span, boxes in one.phrases]
    shown = ", ".join(str(one) for one in images)
    if not captions:
        raise UserError(f"{path} is empty: expected one caption with its phrases in each line")
    if not kept:
        raise UserError(f"{shown}: none of the images that {path} names is there, the first is {captions[0].key!r}")
    if not phrases:
        raise UserError(f"{path}: no caption with an image in {shown} has a phrase")
    index = {key: number for number, key in enumerate(dict.fromkeys(kept[number].key for number, _, _ in phrases))}
    game = PointingGame(
        image_source([members[key] for key in index]),
        [index[kept[number].key] for number, _, _ in phrases],
        [kept[number].text for number, _, _ in phrases],
        [span for _, span, _ in phrases],
        [boxes for _, _, boxes in phrases],
    )
    return Grounding(game, [number for number, _, _ in phrases], len(captions) - len(kept))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except (UnicodeDecodeError, EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _caption(line: str, where: str) -> _Caption:
    try:
        item = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})") from None
    if not isinstance(item, Mapping):
        raise UserError(f"{where}: expected key, caption and phrases, got {shorten(str(item))}")
    for name in ("key", "caption"):
        if not isinstance(item.get(name), str) or not item[name].strip():
            raise UserError(f"{where}: {name!r} is missing or no text")
    phrases, text = item.get("phrases"), item["caption"]
    if not isinstance(phrases, list):
        raise UserError(f"{where}: 'phrases' must be a list")
    named = [(phrase, f"{where}, phrase {number}") for number, phrase in enumerate(phrases)]
    return _Caption(item["key"], text, [(_span(phrase, text, name), _boxes(phrase, name)) for phrase, name in named])


def _span(phrase: Any, caption: str, where: str) -> Span:
    if not isinstance(phrase, Mapping):
        raise UserError(f"{where}: expected start, end and boxes, got {shorten(str(phrase))}")
    start, end = phrase.get("start"), phrase.get("end")
    if type(start) is not int or type(end) is not int:
        raise UserError(f"{where}: 'start' and 'end' must be numbers of characters, got {start!r} and {end!r}")
    if not 0 <= start < end <= len(caption):
        raise UserError(f"{where}: {start} to {end} lies outside of a caption of {len(caption)} characters")
    if not is_word(caption[start:end]):
        raise UserError(f"{where}: {caption[start:end]!r} holds no word")
    return Span(start, end, "")


def _boxes(phrase: Mapping[str, Any], where: str) -> list[Box]:
    """The boxes of a phrase, each once."""
    boxes = phrase.get("boxes")
    if not isinstance(boxes, list) or not boxes:
        raise UserError(f"{where}: 'boxes' must be a list of at least one box")
    return list(dict.fromkeys(_box(box, where) for box in boxes))


def _box(box: Any, where: str) -> Box:
    # NaN fails the comparison as well.
    numbers = isinstance(box, list) and all(isinstance(side, int | float) and 0 <= side <= 1 for side in box)
    if not numbers or len(box) != 4:
        raise UserError(
            f"{where}: a box is left, top, right and bottom in shares of the sides, 0 to 1, got {shorten(str(box))}"
        )
    left, top, right, bottom = map(float, box)
    if left >= right or top >= bottom:
        raise UserError(
            f"{where}: box {box} has no area: left, top, right and bottom are expected, not a width and a height"
        )
    return left, top, right, bottom
