"""The embedded scenes as tasks: retrieval, zero-shot classification, composition and the pointing game."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.data import scenes as data
from powerclip.evaluate.images import pack_pixels, unpack_pixels
from powerclip.evaluate.tasks import CaptionRetrieval, Classification, Grounding, HardNegatives, PointingGame, Task

if TYPE_CHECKING:
    from PIL import Image

    from powerclip.encoders import DualEncoder

TEMPLATES = ("{c}", "a picture of {c}", "there is {c}")  # the class name brings its article
_BLOCK = 250  # scenes drawn at once


@dataclass(frozen=True)
class SceneImages:
    """Rendered scenes."""

    scenes: Sequence[data.Scene]
    pixels: Tensor  # [scenes, 3, H, W] uint8

    @property
    def names(self) -> Sequence[str]:
        """The scenes' keys."""
        return [scene.key for scene in self.scenes]

    def read(self, index: int) -> bytes:
        """The pixels of a scene."""
        from PIL import Image

        return pack_pixels(Image.fromarray(self.pixels[index].permute(1, 2, 0).numpy()))

    def decode(self, content: bytes) -> Image.Image:
        """The image with these pixels."""
        return unpack_pixels(content)


def draw(scenes: Sequence[data.Scene], size: int) -> SceneImages:
    """Scenes as images of `size` pixels. Blocks of them are drawn ten times faster than single ones."""
    blocks = [data.render(scenes[start : start + _BLOCK], size) for start in range(0, len(scenes), _BLOCK)]
    return SceneImages(scenes, torch.cat(blocks))


def scene_images(encoder: DualEncoder, scenes: Sequence[data.Scene]) -> Tensor:
    """Scenes as a model reads them [scenes, 3, H, W], by its own preprocessing."""
    from powerclip.encoders import preprocess_for

    source, prepare = draw(scenes, encoder.image_size[0]), preprocess_for(encoder)
    return torch.stack([prepare(source.decode(source.read(index))) for index in range(len(scenes))])


def scene_tasks(count: int, size: int, seed: int = 0) -> dict[str, Task]:
    """The tasks on `count` scenes of the test split, drawn at `size` pixels, the size that the model reads.

    Composition and pointing use the first half of them; zero-shot has half as many scenes from a split of its own.
    """
    scenes = data.test_scenes(count, seed)
    half = scenes[: (count + 1) // 2]
    images = draw(scenes, size)
    return {
        "retrieval": CaptionRetrieval(images, [scene.caption for scene in scenes], torch.arange(count)),
        "composition": _composition(images, half),  # after retrieval: the same images are embedded once
        "zero_shot": _zero_shot(data.scene_batch(range(max(1, count // 2)), seed, "zero_shot"), size),
        "pointing": _pointing(SceneImages(half, images.pixels[: len(half)])),
    }


def scene_grounding(count: int, size: int, seed: int = 0, split: str = "collective_test") -> Grounding:
    """Pointing, swap and set accuracy on `count` scenes, whose phrases name one object or several.

    The regions of set accuracy are all objects of a scene, named or not.
    """
    scenes = data.scene_batch(range(count), seed, split)
    phrases = [(number, span, boxes) for number, scene in enumerate(scenes) for span, boxes in scene.phrase_sets]
    game = PointingGame(
        draw(scenes, size),
        [number for number, _, _ in phrases],
        [scenes[number].caption for number, _, _ in phrases],
        [span for _, span, _ in phrases],
        [list(boxes) for _, _, boxes in phrases],
        [[thing.box for thing in scenes[number].objects] for number, _, _ in phrases],
    )
    return Grounding(game, game.image_of_phrase)


def _composition(images: SceneImages, scenes: Sequence[data.Scene]) -> HardNegatives:
    """Hard negatives of `scenes`, which `images` begin with."""
    items = [
        (number, kind, negative)
        for number, scene in enumerate(scenes)
        for kind, negative in data.hard_negatives(scene).items()
    ]
    return HardNegatives(
        images,
        torch.tensor([number for number, _, _ in items]),
        [scenes[number].caption for number, _, _ in items],
        [negative for _, _, negative in items],
        [kind for _, kind, _ in items],
    )


def _zero_shot(scenes: Sequence[data.Scene], size: int) -> Classification:
    names = [f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in data.zero_shot_classes()]
    labels = torch.tensor([data.zero_shot_label(scene) for scene in scenes])
    return Classification(draw(scenes, size), labels, names, TEMPLATES)


def _pointing(images: SceneImages) -> PointingGame:
    scenes = images.scenes
    phrases = [(number, span, box) for number, scene in enumerate(scenes) for span, box in scene.phrase_boxes]
    return PointingGame(
        images,
        [number for number, _, _ in phrases],
        [scenes[number].caption for number, _, _ in phrases],
        [span for _, span, _ in phrases],
        [[box] for _, _, box in phrases],
        [[thing.box for thing in scenes[number].objects] for number, _, _ in phrases],
    )
