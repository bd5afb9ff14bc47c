"""Which columns of a table hold the image and its captions: as the user says, or as heads say that leave no doubt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from powerclip.errors import UserError, nearest

IMAGE_HEADS = (
    *("filepath", "file_path", "filename", "file_name", "file", "path"),
    *("image", "image_path", "image_file", "image_name", "img", "img_path"),
)
CAPTION_HEADS = ("title", "caption", "captions", "text", "texts", "sentence", "sentences", "description")

# By these a cell of the first row is known to be data, in a file that has no heads.
_FILE_NAME = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?)$", re.IGNORECASE)
_CAPTION = re.compile(rf"({'|'.join(sorted(CAPTION_HEADS, key=len, reverse=True))})_?\d*")


@dataclass(frozen=True)
class Columns:
    """The columns that the user names, by their heads or by their numbers from 1 on; empty where they are guessed."""

    image: str = ""
    captions: tuple[str, ...] = ()
    settings: tuple[str, str] = ("data.image", "data.captions")  # where the user names them, for messages

    @classmethod
    def named(cls, image: str | None, captions: str | None) -> Columns:
        """From a recipe's `data.image` and `data.captions`, the latter with commas between several."""
        names = [name.strip() for name in (captions or "").split(",")]
        return cls(image or "", tuple(name for name in names if name))


@dataclass(frozen=True)
class Layout:
    """Where the image and the captions of a row are."""

    image: int
    captions: tuple[int, ...]
    width: int  # cells of a row
    has_heads: bool
    note: str  # which columns these are, and whether they were guessed, in words


def find_columns(first: Sequence[str], columns: Columns, path: Path, *, may_lack_heads: bool) -> Layout:
    """The layout of a table whose first row is `first`.

    Args:
        first: the cells of the first row: heads, unless the file has none.
        columns: what the user says.
        path: of the table, for messages.
        may_lack_heads: whether the first row may be data, as in a CSV file.

    Raises:
        UserError: a column that the user names is not there, or those that they do not name are in doubt.
    """
    image_setting, caption_setting = columns.settings
    has_heads = not (may_lack_heads and _is_data(first))
    image = _position(columns.image, first, has_heads, path, image_setting) if columns.image else None
    captions = tuple(_position(name, first, has_heads, path, caption_setting) for name in columns.captions)
    if has_heads:
        image = _only(first, _image_heads(first), path, "the image", image_setting) if image is None else image
        captions = captions or _caption_heads(first, path, caption_setting)
    elif len(first) == 2 and (image is None or not captions):
        # The other one of two.
        image = (1 - captions[0] if captions else _file_cell(first)) if image is None else image
        captions = captions or (1 - image,)
    elif image is None or not captions:
        raise UserError(
            f"{path} has no line of heads (its first row is {_row(first)}): say which columns are meant by their "
            f"numbers, such as {image_setting}=1 {caption_setting}=2,3"
        )
    if image in captions:
        raise UserError(f"{path}: {_name(first, image, has_heads)} cannot be the image and a caption")
    names = ", ".join(_name(first, number, has_heads) for number in captions)
    guessed = "" if columns.image and columns.captions else " (guessed)"
    heads = "" if has_heads else "no line of heads; "
    note = f"{heads}image: {_name(first, image, has_heads)}, captions: {names}{guessed}"
    return Layout(image, captions, len(first), has_heads, note)


def _is_data(first: Sequence[str]) -> bool:
    """Whether a first row is no line of heads: it holds the name of an image file."""
    return any(_FILE_NAME.search(cell.strip()) for cell in first)


def _file_cell(first: Sequence[str]) -> int:
    return next(number for number, cell in enumerate(first) if _FILE_NAME.search(cell.strip()))


def _plain(head: str) -> str:
    return re.sub(r"[\s-]+", "_", head.strip().lower())


def _image_heads(heads: Sequence[str]) -> list[int]:
    return [number for number, head in enumerate(heads) if _plain(head) in IMAGE_HEADS]


def _caption_heads(heads: Sequence[str], path: Path, setting: str) -> tuple[int, ...]:
    """All columns of one kind: `caption`, or `caption_1`, `caption_2`, …; two kinds leave a doubt."""
    kinds: dict[str, list[int]] = {}
    for number, head in enumerate(heads):
        if match := _CAPTION.fullmatch(_plain(head)):
            kinds.setdefault(match[1].removesuffix("s"), []).append(number)
    if len(kinds) == 1:
        return tuple(next(iter(kinds.values())))
    return (_only(heads, [number for numbers in kinds.values() for number in numbers], path, "the caption", setting),)


def _only(heads: Sequence[str], found: Sequence[int], path: Path, what: str, setting: str) -> int:
    if len(found) == 1:
        return found[0]
    if len(heads) == 1 and (mark := next((mark for mark in ";|\t" if mark in heads[0]), None)):
        raise UserError(f"{path}: its cells are separated by {mark!r}: write them with commas, or with tabs as a .tsv")
    names = [heads[number] for number in found]
    if len(set(names)) < len(names):
        numbers = ", ".join(str(number + 1) for number in found)
        raise UserError(f"{path}: columns {numbers} are all called {names[0]!r}; set {setting} to the number of one")
    which = f"{_listed(names)} could" if found else "none is known to"
    raise UserError(f"{path}: of its columns {_listed(heads)}, {which} hold {what}; set {setting} to the one that does")


def _position(name: str, first: Sequence[str], has_heads: bool, path: Path, setting: str) -> int:
    """Which column the user means."""
    if has_heads and name in first:
        return list(first).index(name)
    if name.isdecimal() and 1 <= int(name) <= len(first):
        return int(name) - 1
    if not has_heads:
        raise UserError(
            f"{setting}: {path} has no line of heads (its first row is {_row(first)}); "
            f"name a column by its number, 1 to {len(first)}"
        )
    raise UserError(f"{setting}: {path} has no column {name!r}{nearest(name, list(first))}; it has {_listed(first)}")


def _name(first: Sequence[str], number: int, has_heads: bool) -> str:
    return first[number] if has_heads else f"column {number + 1}"


def _row(cells: Sequence[str]) -> str:
    return " | ".join(cell if len(cell) <= 40 else f"{cell[:39]}…" for cell in cells)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
