"""Heatmaps of a few test scenes, model under model, with the gold boxes of their phrases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from powerclip.data.scenes import Scene, render, test_scenes
from powerclip.data.tokens import CaptionTokenizer
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.ground import caption_heatmaps
from powerclip.evaluate.scenes import scene_images
from powerclip.report.heatmaps import Panel, Row

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

SHOWN = 4  # scenes
PHRASES = (3, 5)  # fewest and most phrases beside the caption: enough to compare, few enough to read


def scene_rows(encoders: Mapping[str, DualEncoder], shown: int = SHOWN) -> list[Row]:
    """For each of the first fitting test scenes, a row for each model: the caption, then each phrase of its tree."""
    embedders = {name: Embedder(encoder, CaptionTokenizer()) for name, encoder in encoders.items()}
    rows = []
    for scene in _fitting(shown):
        for position, (name, embedder) in enumerate(embedders.items()):
            image = render([scene], 4 * embedder.encoder.image_size[0])[0]
            caption = scene.caption if position == 0 else ""
            panels = _panels(embedder, scene)
            rows.append(Row(image, panels, name, caption, continues=position > 0))
    return rows


def _fitting(count: int) -> list[Scene]:
    """The first scenes whose captions fit a line and have something to tell apart."""
    fewest, most = PHRASES
    fitting: list[Scene] = []
    for scene in test_scenes(100 * count, seed=0):
        _, *phrases = scene.tree.nodes
        # A verb alone ("lies") is a phrase of the tree, but no image shows where it is.
        shown = all(" " in scene.caption[node.start : node.end] for node in phrases)
        if shown and fewest <= len(phrases) <= most and len(scene.phrase_boxes) >= 2:
            fitting.append(scene)
    return fitting[:count]


def _panels(embedder: Embedder, scene: Scene) -> list[Panel]:
    pixels = scene_images(embedder.encoder, [scene])[0]
    phrases, heat = caption_heatmaps(embedder, pixels, scene.caption, scene.tree)
    # Phrases of a scene that read the same name the same object.
    boxes = {scene.caption[span.start : span.end]: box for span, box in scene.phrase_boxes}
    return [
        Panel(phrase if number else "whole caption", values, boxes.get(phrase))
        for number, (phrase, values) in enumerate(zip(phrases, heat, strict=True))
    ]
