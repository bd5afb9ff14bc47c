"""Tiny towers, data and runs that the tests of detection share."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from powerclip.detect.data import BoxSet
from powerclip.detect.recipe import DetectRecipe
from powerclip.detect.scene_boxes import scene_boxes
from powerclip.encoders import DualEncoder, build, save, tokenizer_for

TOWERS: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 48, "head_width": 24, "layers": 1},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
FEW = ("orange circle", "blue triangle", "pink star", "white ring", "green arrow")  # base classes, easily told apart


def tiny_tower(seed: int = 0) -> DualEncoder:
    torch.manual_seed(seed)
    return build(config=TOWERS).eval()


def save_tower(folder: Path) -> Path:
    tower = tiny_tower()
    return save(tower, folder, tokenizer_for(tower))


def tiny_recipe(model: Path, **changes: Any) -> DetectRecipe:
    settings = {
        "size": 64,
        "width": 16,
        "hidden": 32,
        "steps": 6,
        "batch_size": 3,
        "lr": 3e-3,
        "warmup": 1,
        "scenes": 40,
    }
    return DetectRecipe(str(model), **(settings | {"exponents": [0.2, 0.5]} | changes))


def few_scenes(count: int, seed: int = 0) -> BoxSet:
    """Those of `count` scenes that show one of five base classes, with the boxes of these."""
    data = scene_boxes(count, seed)
    return data.only([data.classes.names.index(name) for name in FEW])


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, "PNG")
    return content.getvalue()


CATEGORIES = [
    {"id": 3, "name": "dog", "split": "base"},
    {"id": 5, "name": "cat", "split": "base"},
    {"id": 9, "name": "unicorn", "split": "novel"},
]


def write_coco(folder: Path, boxes: list[Any], **changes: Any) -> Path:
    """A file of three images, 40 × 30, with these boxes, and its images in a compressed tar beside it."""
    images = [{"id": k, "file_name": f"{k:04d}.png", "width": 40, "height": 30} for k in (1, 2, 7)]
    content = {"images": images, "annotations": boxes, "categories": CATEGORIES, **changes}
    path = folder / "boxes.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    with tarfile.open(folder / "boxes.tar.gz", "w:gz") as tar:
        for k in (1, 2, 7):
            data = picture((40 * k % 256, 90, 10))
            member = tarfile.TarInfo(f"{k:04d}.png")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def boxed(image: int, category: int, bbox: Any, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"id": number, "image_id": image, "category_id": category, "bbox": bbox, **more}
