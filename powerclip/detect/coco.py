"""Boxes in COCO's format: `instances_train2017.json`, or any file like it, plain or gzipped, and its images.

Which classes are novel is said by the categories (`"split": "base"` or `"novel"`) or else by OV-COCO's split, by name;
categories of neither are left out. Images come from folders, tars or compressed tars, found by their file name.

A box that cannot be used is counted and named, never guessed.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from powerclip.data.captions import split_member
from powerclip.data.decode import decode_rgb
from powerclip.detect.classes import Classes, ov_coco
from powerclip.detect.data import BoxedImage, BoxSet
from powerclip.errors import UserError
from powerclip.evaluate.images import PACKED, ImageSource, find_images, image_source

MOST_BAD = 0.5  # largest share of boxes that may be unusable: beyond it the file is of another kind
_CUT = 1.0  # pixels that a box may reach beyond its image without a word: annotators' rounding
_NAMED = 3  # annotations that a line of faults names


@dataclass(frozen=True)
class FilePixels:
    """Images out of files, tars or compressed tars."""

    source: ImageSource

    def read(self, number: int, longest: int) -> Tensor | None:
        """The image, shrunk where it is larger; None where it is damaged."""
        try:
            content = self.source.read(number)
        except OSError:
            return None
        pixels = decode_rgb(content, longest)
        return None if pixels is None else torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


class _Faults:
    """What is wrong with annotations, by kind, with the first of each."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self._first: dict[str, list[str]] = {}

    def add(self, kind: str, which: object) -> None:
        self.count[kind] += 1
        named = self._first.setdefault(kind, [])
        if len(named) < _NAMED:
            named.append(str(which))

    def lines(self, where: str) -> list[str]:
        return [
            f"{where}: {count:,} {kind} ({', '.join(self._first[kind])}{', …' if count > _NAMED else ''})"
            for kind, count in self.count.items()
        ]


def read_coco(path: Path, images: Sequence[Path] = ()) -> BoxSet:
    """The images and boxes of a COCO file.

    Args:
        path: the JSON, perhaps gzipped.
        images: folders, tars and compressed tars with its images; without any, those that lie beside it under its name.

    Raises:
        UserError: it is no such file, has no class of either split, or its images are not there.
    """
    content = _read(path)
    for place in images:
        if not place.exists():
            raise UserError(f"--images: there is no file or folder {place}")
    classes, label_of, ignored = _classes(content["categories"], path)
    faults = _Faults()
    listed = _images(content["images"], path, faults)
    boxes: dict[Any, list[tuple[list[float], int, bool]]] = {one: [] for one in listed}
    considered = 0
    for number, annotation in enumerate(content["annotations"]):
        if not isinstance(annotation, Mapping):
            faults.add("annotations that are no mapping left out", f"the {number + 1}th")
            continue
        if annotation.get("category_id") in ignored:
            continue
        considered += 1
        which = f"annotation {annotation.get('id', f'number {number + 1}')}"
        image, label = annotation.get("image_id"), label_of.get(annotation.get("category_id"))
        if image not in listed:
            faults.add("boxes of images that it does not list left out", which)
        elif label is None:
            faults.add("boxes of an unknown class left out", which)
        else:
            box = _box(annotation.get("bbox"), listed[image][1], faults, which)
            if box is not None:
                boxes[image].append((box, label, bool(annotation.get("iscrowd"))))
    usable = sum(map(len, boxes.values()))
    if considered and usable < (1 - MOST_BAD) * considered:
        first = faults.lines(str(path))[0]
        raise UserError(
            f"{first}: only {usable:,} of {considered:,} boxes can be used; bbox is [left, top, width, height]"
        )
    if not usable:
        raise UserError(f"{path}: no box of its {len(classes)} classes")
    keys = {image: split_member(name)[0] for image, (name, _) in listed.items()}
    found = find_images(images or _beside(path), set(keys.values()))
    there = [image for image in listed if keys[image] in found]
    if not there:
        shown = ", ".join(str(one) for one in images or _beside(path))
        raise UserError(
            f"{shown}: none of the images that {path} names is there, such as {next(iter(listed.values()))[0]}"
        )
    for image in listed.keys() - set(there):
        faults.add("images that are not there left out", listed[image][0])
    return BoxSet(
        source=str(path),
        classes=classes,
        images=tuple(_boxed(listed[image], boxes[image]) for image in there),
        pixels=FilePixels(image_source([found[keys[image]] for image in there])),
        numbers=tuple(range(len(there))),
        faults=tuple(faults.lines(str(path))),
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"there is no file {path}: --data takes COCO's instances_….json, or scenes")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        content = json.loads(data)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    keys = ("images", "annotations", "categories")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in keys):
        raise UserError(f"{path}: not in COCO's format: lists of {', '.join(keys)} are expected")
    return content


def _classes(categories: Sequence[Any], path: Path) -> tuple[Classes, dict[Any, int], set[Any]]:
    """The classes in their order, the label of each category, and the categories of neither split."""
    split = {name: part == "novel" for part in ("base", "novel") for name in ov_coco()[part]}
    names: list[str] = []
    novel: list[bool] = []
    label_of: dict[Any, int] = {}
    ignored: set[Any] = set()
    for category in categories:
        if not isinstance(category, Mapping) or not isinstance(category.get("name"), str) or "id" not in category:
            raise UserError(f"{path}: a category needs an id and a name, got {category!r:.60}")
        name, part = category["name"], category.get("split")
        if part not in (None, "base", "novel"):
            raise UserError(f"{path}: the split of category {name!r} is base or novel, not {part!r}")
        if part is None and name not in split:
            ignored.add(category["id"])
            continue
        label_of[category["id"]] = len(names)
        names.append(name)
        novel.append(part == "novel" if part else split[name])
    if not names:
        raise UserError(f"{path}: no category says its split (base or novel), and none is one of OV-COCO's 65")
    return Classes(tuple(names), tuple(novel)), label_of, ignored


def _images(entries: Sequence[Any], path: Path, faults: _Faults) -> dict[Any, tuple[str, tuple[int, int]]]:
    """Image id → file name, and height and width."""
    listed: dict[Any, tuple[str, tuple[int, int]]] = {}
    for number, entry in enumerate(entries):
        named = isinstance(entry, Mapping) and "id" in entry and isinstance(entry.get("file_name"), str)
        sides = (entry.get("height"), entry.get("width")) if named else ()
        if not named or not all(isinstance(side, int) and side > 0 for side in sides):
            faults.add("images without an id, a file_name or a size left out", f"the {number + 1}th")
            continue
        listed[entry["id"]] = (entry["file_name"], (entry["height"], entry["width"]))
    if not listed:
        raise UserError(f"{path}: it lists no image with id, file_name, width and height")
    return listed


def _box(values: Any, size: tuple[int, int], faults: _Faults, which: str) -> list[float] | None:
    """A box in shares of its image, cut at its edges; None for one that is not usable."""
    numbers = isinstance(values, list) and len(values) == 4 and all(type(side) in (int, float) for side in values)
    if not numbers:
        faults.add("boxes that are not four numbers left out", which)
        return None
    left, top, width, height = map(float, values)
    if not all(map(math.isfinite, (left, top, width, height))):
        faults.add("boxes that are not finite left out", which)
        return None
    if width <= 0 or height <= 0:
        faults.add("boxes of no or of negative size left out", which)
        return None
    edges = (size[1], size[0], size[1], size[0])
    sides = (left, top, left + width, top + height)
    cut = [min(max(side, 0.0), float(edge)) for side, edge in zip(sides, edges, strict=True)]
    if cut[0] >= cut[2] or cut[1] >= cut[3]:
        faults.add("boxes outside of their image left out", which)
        return None
    if max(abs(a - b) for a, b in zip(sides, cut, strict=True)) > _CUT:
        faults.add("boxes cut at the edges of their image", which)
    return [side / edge for side, edge in zip(cut, edges, strict=True)]


def _boxed(image: tuple[str, tuple[int, int]], boxes: Sequence[tuple[list[float], int, bool]]) -> BoxedImage:
    name, size = image
    return BoxedImage(
        name,
        size,
        torch.tensor([box for box, _, _ in boxes], dtype=torch.float32).view(-1, 4),
        torch.tensor([label for _, label, _ in boxes], dtype=torch.long),
        torch.tensor([crowd for _, _, crowd in boxes], dtype=torch.bool),
    )


def _beside(path: Path) -> list[Path]:
    """Where a file's images usually lie: `train.json.gz` beside `train.tar.gz` or `train/`, COCO's in `train2017/`."""
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    stems = dict.fromkeys((stem, stem.removeprefix("instances_")))
    folders = (path.parent, path.parent.parent, path.parent / "images", path.parent.parent / "images")
    for folder in folders:
        for name in stems:
            for suffix in ("", ".tar", *PACKED):
                place = folder / f"{name}{suffix}"
                if place.is_dir() if not suffix else place.is_file():
                    return [place]
    raise UserError(f"{path}: its images are not beside it; say where they are with --images (folder, .tar or .tar.gz)")
