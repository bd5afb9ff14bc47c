"""Embedded scenes: images of a few objects with captions, gold trees, gold boxes and hard negatives, from numbers.

Nothing is stored: `generate(seed, index, split)` makes a scene, `render(scenes, size)` draws a batch of them.
Splits: "train" · "test" (the same kind of scene, other numbers) · "zero_shot" (one object, in a combination of colour
and shape that the other two never show) · "collective", "collective_test" (phrases for several objects at once).
"""

from powerclip.data.scenes.layout import SceneObject
from powerclip.data.scenes.negatives import NEGATIVE_KINDS, hard_negatives
from powerclip.data.scenes.render import PackedScenes, pack_scenes, render, render_packed
from powerclip.data.scenes.scene import (
    SPLITS,
    Scene,
    generate,
    scene_batch,
    test_scenes,
    zero_shot_classes,
    zero_shot_label,
)
from powerclip.data.scenes.vocabulary import HELD_OUT

__all__ = [
    "HELD_OUT",
    "NEGATIVE_KINDS",
    "SPLITS",
    "PackedScenes",
    "Scene",
    "SceneObject",
    "generate",
    "hard_negatives",
    "pack_scenes",
    "render",
    "render_packed",
    "scene_batch",
    "test_scenes",
    "zero_shot_classes",
    "zero_shot_label",
]
