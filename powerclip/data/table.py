"""Tables of images and captions: CSV, TSV, JSONL, parquet, or a folder of NAME.jpg and NAME.txt. Pixels stay on disk.

An image may occur on several rows; its captions are gathered. Paths are relative to the file, or absolute. Paths and
captions lie in Arrow's memory, about 150 bytes a row, so that a million rows are no matter and processes share them.
Rows that cannot be used are left out and counted by reason; the first of each reason is named.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from powerclip.data.captions import IMAGE_SUFFIXES, is_text
from powerclip.data.columns import Columns, Layout, find_columns
from powerclip.errors import UserError, first_line

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
FOLDER_NOTE = "images with a .txt file of the same name, a caption a line"

# Why a row is left out; an image without a file counts once.
NO_IMAGE = "image not there"
NO_CAPTION = "no caption"
NOT_TEXT = "captions that are no text"
BROKEN = "other cells than heads"

_FOLDER_IMAGES = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)
_CHUNK = 20_000  # rows that are Python objects at a time
_MANY = 1000  # images in one folder: from here on the folder is listed instead


@dataclass(frozen=True)
class Table:
    """Images by number, each with its captions, in the order in which the rows name them first."""

    path: Path
    folder: Path  # what the paths of images are relative to
    note: str  # which columns were read
    images: pa.Array  # [images] paths as they are written, relative to `folder`
    captions: pa.ListArray  # [images] of texts
    left_out: dict[str, int] = field(default_factory=dict)  # rows or images, by reason
    first: dict[str, str] = field(default_factory=dict)  # reason → where it was met first

    def __len__(self) -> int:
        return len(self.images)

    def key(self, number: int) -> str:
        """What an image is called: its path as it is written."""
        return str(self.images[number].as_py())

    def file(self, number: int) -> Path:
        """Where an image lies."""
        return self.folder / self.key(number)

    def texts(self, number: int) -> list[str]:
        """The captions of an image."""
        return list(self.captions[number].as_py())

    def slice(self, rows: range) -> Table:
        """Some of the images, without a copy."""
        images, captions = (column.slice(rows.start, len(rows)) for column in (self.images, self.captions))
        return replace(self, images=images, captions=captions)

    def fingerprint(self) -> str:
        """What changes when a name or a caption does."""
        digest = blake2b(digest_size=16)
        for column in (self.images, self.captions.flatten()):
            digest.update("\0".join(column.to_pylist()).encode("utf-8", errors="surrogatepass") + b"\1")
        digest.update(np.diff(self.captions.offsets.to_numpy()).tobytes())
        return digest.hexdigest()

    def complaints(self) -> list[str]:
        """`3 left out: image not there (first line 17: gone.jpg)`, for each reason."""
        return [f"{count:,} left out: {why} (first {self.first[why]})" for why, count in self.left_out.items()]

    def summary(self) -> str:
        """`1,000 images, 5,000 captions; image: filepath, captions: title (guessed)`, and what was left out."""
        captions = len(self.captions.flatten())
        return "; ".join([f"{len(self):,} images, {captions:,} captions", self.note, *self.complaints()])


def is_table(path: Path) -> bool:
    """Whether a path is a table by its name, or a folder in which an image has its .txt file."""
    if path.is_dir():
        return any(_with_texts(files) for _, files in _walk(path))
    return path.suffix.lower() in TABLE_SUFFIXES


def read_table(path: Path, columns: Columns | None = None) -> Table:
    """The table at `path`: its rows that have a caption, and whose image is there.

    Raises:
        UserError: it cannot be read, columns are in doubt, or no row can be used.
    """
    reader = _Rows(path, columns or Columns())
    try:
        table = _gather(path, reader)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if not len(table) and not table.left_out:
        raise UserError(f"{path}: no rows{'' if path.is_dir() else ' below the heads'}")
    table = table if path.is_dir() else _existing(table)
    if not len(table):
        raise UserError(f"{path}: no row can be used; {'; '.join(table.complaints())}; {table.note}")
    return table


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass
class _Rows:
    """The rows of a table: where each is, its image and its captions. What cannot be used is counted."""

    path: Path
    columns: Columns
    note: str = ""
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        suffix = self.path.suffix.lower()
        if self.path.is_dir():
            return self._of_folder()
        if suffix == ".parquet":
            rows = self._of_parquet()
        elif suffix in (".jsonl", ".ndjson"):
            rows = self._of_json()
        else:
            rows = self._of_text("\t" if suffix == ".tsv" else ",")
        return self._usable(rows)

    def reject(self, reason: str, where: str) -> None:
        """Count a row that is left out."""
        self.left_out[reason] += 1
        self.first.setdefault(reason, where)

    def _usable(self, rows: Iterable[tuple[str, Any, list[Any]]]) -> Iterator[tuple[str, list[str]]]:
        for where, image, cells in rows:
            if not isinstance(image, str) or not image.strip():
                self.reject(NO_IMAGE, f"{where}: the cell is empty")
                continue
            listed = [text for cell in cells for text in (cell if isinstance(cell, list) else [cell])]
            texts = [text.strip() for text in listed if isinstance(text, str) and text.strip()]
            good = [text for text in texts if is_text(text)]
            if good:
                yield image.strip(), good
            else:
                self.reject(NOT_TEXT if texts else NO_CAPTION, f"{where}: {image.strip()}")

    def _of_text(self, delimiter: str) -> Iterator[tuple[str, Any, list[Any]]]:
        layout: Layout | None = None
        try:
            with self.path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, delimiter=delimiter)
                for row in reader:
                    if not any(cell.strip() for cell in row):
                        continue
                    if layout is None:
                        layout = self._layout(row, may_lack_heads=True)
                        if layout.has_heads:
                            continue
                    if len(row) > layout.width:  # a comma in a caption without quotes would cut it
                        self.reject(BROKEN, f"line {reader.line_num}: {len(row)} instead of {layout.width}")
                        continue
                    cells = row + [""] * (layout.width - len(row))
                    yield f"line {reader.line_num}", cells[layout.image], [cells[at] for at in layout.captions]
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{self.path} cannot be read as a table in UTF-8: {first_line(error)}") from None

    def _of_json(self) -> Iterator[tuple[str, Any, list[Any]]]:
        layout: Layout | None = None
        heads: list[str] = []
        try:
            with self.path.open(encoding="utf-8-sig") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    row = _json_object(line)
                    if row is None:
                        self.reject(BROKEN, f"line {number}: not a JSON object")
                        continue
                    if layout is None:
                        heads = list(row)
                        layout = self._layout(heads, may_lack_heads=False)
                    texts = [row.get(heads[at]) for at in layout.captions]
                    yield f"line {number}", row.get(heads[layout.image]), texts
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path} is not a text in UTF-8 ({error})") from None

    def _of_parquet(self) -> Iterator[tuple[str, Any, list[Any]]]:
        try:
            with pq.ParquetFile(self.path) as file:
                schema = file.schema_arrow
                layout = self._layout(schema.names, may_lack_heads=False)
                head = schema.names[layout.image]
                kind = schema.field(head).type
                if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                    raise UserError(f"{self.path}: its column {head} holds {kind}; the paths of image files are read")
                heads = [head, *(schema.names[at] for at in layout.captions)]
                number = 0
                for batch in file.iter_batches(_CHUNK, columns=heads):
                    for row in zip(*(batch.column(name).to_pylist() for name in heads), strict=True):
                        number += 1
                        yield f"row {number}", row[0], list(row[1:])
        except pa.ArrowException as error:
            raise UserError(f"{self.path} cannot be read as parquet: {first_line(error)}") from None

    def _of_folder(self) -> Iterator[tuple[str, list[str]]]:
        self.note = FOLDER_NOTE
        with ThreadPoolExecutor(16) as pool:
            for folder, files in _walk(self.path):
                images = sorted(name for name in files if name.lower().endswith(_FOLDER_IMAGES))
                texts = pool.map(lambda name, folder=folder: _read_text(folder / name), images)
                for name, captions in zip(images, texts, strict=True):
                    key = (folder / name).relative_to(self.path).as_posix()
                    if captions:
                        yield key, captions
                    else:
                        self.reject(NO_CAPTION, key)

    def _layout(self, first: Sequence[str], *, may_lack_heads: bool) -> Layout:
        layout = find_columns([str(cell) for cell in first], self.columns, self.path, may_lack_heads=may_lack_heads)
        self.note = layout.note
        return layout


def _json_object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _walk(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The folders below `folder` with the files of each, in the order of their names; hidden ones are left out."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(parent), files


def _with_texts(files: Sequence[str]) -> bool:
    names = set(files)
    images = (name for name in files if name.lower().endswith(_FOLDER_IMAGES))
    return any(f"{os.path.splitext(name)[0]}.txt" in names for name in images)


def _read_text(image: Path) -> list[str]:
    """The captions in the .txt file of an image, a line each; none when there is no such file, or it is no text."""
    try:
        text = image.with_suffix(".txt").read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return []
    return [line.strip() for line in text.splitlines() if line.strip() and is_text(line)]


# ---- images ----------------------------------------------------------------------------------------------------------


def _gather(path: Path, rows: _Rows) -> Table:
    """All rows, those of the same image together."""
    number_of: dict[str, int] = {}
    chunks: list[pa.Array] = []
    texts: list[str] = []
    owners: list[int] = []
    owner_chunks: list[npt.NDArray[np.int64]] = []

    def close() -> None:
        chunks.append(pa.array(texts, pa.large_string()))
        owner_chunks.append(np.array(owners, np.int64))
        texts.clear()
        owners.clear()

    for image, captions in rows:
        number = number_of.setdefault(image, len(number_of))
        texts += captions
        owners += [number] * len(captions)
        if len(texts) >= _CHUNK:
            close()
    close()
    owner = np.concatenate(owner_chunks)
    flat = pa.concat_arrays(chunks)
    if np.any(np.diff(owner) < 0):
        flat = flat.take(pa.array(np.argsort(owner, kind="stable")))
    counts = np.bincount(owner, minlength=len(number_of))
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    images = pa.array(list(number_of), pa.large_string())
    captions_of = pa.LargeListArray.from_arrays(offsets, flat)
    folder = path if path.is_dir() else path.parent
    return Table(path, folder, rows.note, images, captions_of, dict(rows.left_out), rows.first)


def _existing(table: Table) -> Table:
    """The images whose file is there."""
    names: list[str] = table.images.to_pylist()
    there = _are_files([table.folder / name for name in names])
    if there.all():
        return table
    missing = int(np.argmin(there))
    kept = pa.array(np.flatnonzero(there))
    first = names[missing]
    hint = "; images are read from files: fetch them first, as with img2dataset" if "://" in first else ""
    return replace(
        table,
        images=table.images.take(kept),
        captions=table.captions.take(kept),
        left_out={NO_IMAGE: table.left_out.get(NO_IMAGE, 0) + int((~there).sum())} | _without(table.left_out, NO_IMAGE),
        first={NO_IMAGE: (first if hint else str(table.folder / first)) + hint} | _without(table.first, NO_IMAGE),
    )


def _without(counted: dict[str, Any], reason: str) -> dict[str, Any]:
    return {key: value for key, value in counted.items() if key != reason}


def _are_files(paths: Sequence[Path]) -> npt.NDArray[np.bool_]:
    """Whether each is there. A folder with many of them is listed once: that is quicker than as many questions."""
    by_folder: dict[str, list[int]] = {}
    for number, path in enumerate(paths):
        by_folder.setdefault(os.path.dirname(path), []).append(number)
    there = np.zeros(len(paths), np.bool_)

    def check(item: tuple[str, list[int]]) -> None:
        folder, numbers = item
        if len(numbers) < _MANY:
            there[numbers] = [paths[number].is_file() for number in numbers]
            return
        try:
            listed = {entry.name for entry in os.scandir(folder)}
        except OSError:
            return
        there[numbers] = [paths[number].name in listed for number in numbers]

    with ThreadPoolExecutor(16) as pool:  # mostly waiting for a file system that may be far away
        list(pool.map(check, by_folder.items()))
    return there
