"""Small benchmarks made in a moment, and a tiny model for them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mini_corpus import write_shard
from PIL import Image

from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, build, tokenizer_for

CONFIG: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}
CLASSES = ["apple pie", "bear", "cup", "dog", "elm tree", "fern", "goat"]


def tiny_model(seed: int = 0) -> tuple[DualEncoder, CaptionTokenizer]:
    torch.manual_seed(seed)
    encoder = build(config=CONFIG).eval()
    return encoder, CaptionTokenizer(tokenizer_for(encoder))


def image(path: Path, seed: int, size: tuple[int, int] = (40, 36)) -> Path:
    """Coarse noise: images that a model tells apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(path)
    return path


def class_folders(folder: Path, each: int = 6, classes: list[str] = CLASSES) -> Path:
    for label, name in enumerate(classes):
        for number in range(each + label % 3):
            image(folder / name.replace(" ", "_") / f"{number}.png", 100 * label + number)
    return folder


def caption_table(folder: Path, count: int = 30) -> Path:
    lines = ["image,caption"]
    for number in range(count):
        name = image(folder / "photos" / f"{number}.png", 1000 + number).relative_to(folder)
        lines += [f'{name},"a {CLASSES[number % 7]}, number {number}, view {view}"' for view in range(1 + number % 3)]
    path = folder / "captions.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def winoground(folder: Path, items: int = 20) -> Path:
    lines = []
    for number in range(items):
        for side in (0, 1):
            image(folder / "images" / f"ex_{number}_img_{side}.png", 2000 + 2 * number + side)
        one, two = CLASSES[number % 7], CLASSES[(number + 1 + number // 7) % 7]
        item = {"caption_0": f"a {one} on a {two}", "caption_1": f"a {two} on a {one}"}
        item |= {f"image_{side}": f"ex_{number}_img_{side}" for side in (0, 1)}
        lines.append(json.dumps({"id": number, **item}))
    (folder / "examples.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def sugarcrepe(folder: Path, items: int = 24) -> Path:
    for kind in ("replace_obj", "swap_att"):
        rows = {}
        for number in range(items):
            name = image(folder / "val2017" / f"{number % 10}.png", 3000 + number % 10).name
            caption, negative = f"a {CLASSES[number % 7]} and a {kind}", f"a {CLASSES[(number + 2) % 7]} and a {kind}"
            rows[str(number)] = {"filename": name, "caption": caption, "negative_caption": negative}
        (folder / f"{kind}.json").write_text(json.dumps(rows))
    return folder


def webdataset(folder: Path, labels: str = "cls", split: str = "test") -> Path:
    """clip-benchmark's layout."""
    members: list[tuple[str, bytes | str]] = []
    for number in range(14):
        content = image(folder / "drawn.png", number).read_bytes()
        members.append((f"s{number:04d}.png", content))
        if labels == "cls":
            members.append((f"s{number:04d}.cls", str(number % 7)))
        elif labels == "npy":
            buffer = io.BytesIO()
            np.save(buffer, np.eye(7, dtype=np.int64)[number % 7])
            members.append((f"s{number:04d}.npy", buffer.getvalue()))
        else:
            members.append((f"s{number:04d}.txt", f"a {CLASSES[number % 7]}\nnumber {number}"))
    (folder / split).mkdir(parents=True, exist_ok=True)
    for number in range(2):
        write_shard(folder / split / f"{number}.tar", members[14 * number : 14 * number + 14])
    (folder / "drawn.png").unlink()
    (folder / "classnames.txt").write_text("\n".join(CLASSES))
    (folder / "zeroshot_classification_templates.txt").write_text("a photo of a {c}.\na {c}\n")
    return folder
