"""Embedded scenes as images with boxes: classes are colours of shapes, and combinations that training never shows are
the novel ones. Nothing is stored, and every box is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from powerclip.data.scenes import HELD_OUT, Scene, generate, render
from powerclip.data.scenes.vocabulary import COLOURS, SHAPES
from powerclip.detect.classes import Classes
from powerclip.detect.data import BoxedImage, BoxSet

_ANNOTATED = 1000  # pixels of a side in which boxes are written out


@dataclass(frozen=True)
class ScenePixels:
    """Images that are drawn when they are asked for."""

    scenes: tuple[Scene, ...]

    def read(self, number: int, longest: int) -> Tensor:
        """The scene, `longest` pixels high and wide."""
        return render([self.scenes[number]], longest)[0]


def scene_classes() -> Classes:
    """Every colour of every shape: "red circle", …; those that the scenes of training never show are novel."""
    pairs = [(colour, shape) for shape in SHAPES for colour in COLOURS]
    return Classes(tuple(f"{c} {s}" for c, s in pairs), tuple(pair in HELD_OUT for pair in pairs))


def scene_boxes(count: int, seed: int = 0, part: Literal["train", "val"] = "train") -> BoxSet:
    """`count` scenes with the boxes of their objects.

    Those of `val` are by halves of the split "test", which has base classes only, and of "zero_shot", which has one
    object of a novel class each.
    """
    splits = ["train"] * count if part == "train" else [("test", "zero_shot")[k % 2] for k in range(count)]
    scenes = tuple(generate(seed, number, split) for number, split in enumerate(splits))
    classes = scene_classes()
    label_of = {name: label for label, name in enumerate(classes.names)}
    images = [
        BoxedImage(
            scene.key,
            (_ANNOTATED, _ANNOTATED),
            torch.tensor([thing.box for thing in scene.objects]),
            torch.tensor([label_of[f"{thing.colour} {thing.shape}"] for thing in scene.objects]),
            torch.zeros(len(scene.objects), dtype=torch.bool),
        )
        for scene in scenes
    ]
    return BoxSet(f"scenes ({part})", classes, tuple(images), ScenePixels(scenes), tuple(range(count)))
