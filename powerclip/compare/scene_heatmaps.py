"""Heatmaps of a few test scenes, model under model, with the gold boxes of their phrases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from powerclip.data.scenes import Scene, render, test_scenes
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import preprocess_for
from powerclip.evaluate.ground import GroundingModel, ground
from powerclip.evaluate.scenes import draw
from powerclip.report.heatmaps import Panel, Row

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

SHOWN = 4  # scenes
PHRASES = (3, 5)  # fewest and most phrases beside the caption: enough to compare, few enough to read


def scene_rows(encoders: Mapping[str, DualEncoder], shown: int = SHOWN) -> list[Row]:
    """For each of the first fitting test scenes, a row for each model: the caption, then each phrase of its tree."""
    models = [
        GroundingModel(name, encoder, preprocess_for(encoder), CaptionTokenizer()) for name, encoder in encoders.items()
    ]
    rows = []
    for scene in _fitting(shown):
        for position, model in enumerate(models):
            image = render([scene], 4 * model.encoder.image_size[0])[0]
            caption = scene.caption if position == 0 else ""
            rows.append(Row(image, _panels(model, scene), model.name, caption, continues=position > 0))
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


def _panels(model: GroundingModel, scene: Scene) -> list[Panel]:
    drawn = draw([scene], model.encoder.image_size[0])
    found = ground(model, drawn.decode(drawn.read(0)), scene.caption, tree=scene.tree)
    # Phrases of a scene that read the same name the same object.
    boxes = {scene.caption[span.start : span.end]: box for span, box in scene.phrase_boxes}
    return [
        Panel("whole caption", found.heatmap, boxes.get(scene.caption)),
        *(Panel(phrase.text, phrase.heatmap, boxes.get(phrase.text)) for phrase in found.phrases[1:]),
    ]
