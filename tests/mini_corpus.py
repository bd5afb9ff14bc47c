"""A corpus of plain images, made in a moment: shards, trees and comparisons in the formats that we read."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 220),
    "yellow": (230, 220, 40),
    "white": (250, 250, 250),
    "black": (10, 10, 10),
}


def png(colour: tuple[int, int, int] = (0, 0, 0), size: tuple[int, int] = (20, 20)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "png")
    return file.getvalue()


def write_shard(path: Path, members: Iterable[tuple[str, bytes | str]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key: str, colour: str, captions: list[str]) -> list[tuple[str, bytes | str]]:
    return [(f"{key}.png", png(COLOURS[colour])), (f"{key}.json", json.dumps({"captions": captions}))]


def tree(caption: str) -> str:
    """The tree of "a red square" or "a red square on a wall"."""
    phrase, on, rest = caption.partition(" on ")
    return f"(NP (NP {phrase}) (PP on (NP {rest})))" if on else f"(NP {phrase})"


def write_mini_corpus(folder: Path) -> Path:
    """`train-000.tar`, `train-001.tar`, `val-000.tar`, `trees.tsv` and `sugarcrepe/` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(COLOURS)
    rows = []
    shards: dict[str, list[tuple[str, bytes | str]]] = {"train-000": [], "train-001": [], "val-000": []}
    for number in range(18):
        key, colour = f"sample{number:03d}", names[number % 6]
        captions = [f"a {colour} square", f"a {colour} square on a wall number {number}"][: 1 + number % 2]
        shards[list(shards)[number // 6]] += sample(key, colour, captions)
        rows += [f"{key}\t{place}\t{tree(caption)}\n" for place, caption in enumerate(captions)]
    for name, members in shards.items():
        write_shard(folder / f"{name}.tar", members)
    (folder / "trees.tsv").write_text("".join(rows), encoding="utf-8")
    write_mini_sugarcrepe(folder / "sugarcrepe")
    return folder


def write_mini_sugarcrepe(folder: Path) -> Path:
    """Three comparisons of two kinds, and one whose image is not there."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name in ("red", "blue"):
        (folder / "images" / f"{name}.png").write_bytes(png(COLOURS[name], (30, 20)))

    def items(*rows: tuple[str, str, str]) -> str:
        keys = ("filename", "caption", "negative_caption")
        return json.dumps({str(place): dict(zip(keys, row, strict=True)) for place, row in enumerate(rows)})

    attributes = items(
        ("red.png", "a red square", "a blue square"),
        ("blue.png", "a blue square", "a red square"),
        ("gone.png", "a white square", "a black square"),
    )
    (folder / "replace_att.json").write_text(attributes)
    (folder / "swap_obj.json").write_text(items(("red.png", "a square on a wall", "a wall on a square")))
    return folder
