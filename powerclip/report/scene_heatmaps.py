"""Heatmaps of a few test scenes, model under model, with the gold boxes of their phrases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from powerclip.data.scenes import Scene, render, test_scenes
from powerclip.data.tokens import CaptionTokenizer
from powerclip.data.trees import Tree
from powerclip.evaluate.heatmap import patch_similarity, text_queries, word_queries
from powerclip.evaluate.scenes import scene_images
from powerclip.report.heatmaps import Panel, Row

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

SHOWN = 4  # scenes
PHRASES = (3, 5)  # fewest and most phrases beside the caption: enough to compare, few enough to read


def scene_rows(encoders: Mapping[str, DualEncoder], shown: int = SHOWN) -> list[Row]:
    """For each of the first fitting test scenes, a row for each model: the caption, then each phrase of its tree."""
    tokenizer = CaptionTokenizer()
    rows = []
    for scene in _fitting(shown):
        for position, (name, encoder) in enumerate(encoders.items()):
            image = render([scene], 4 * encoder.image_size[0])[0]
            caption = scene.caption if position == 0 else ""
            panels = _panels(encoder, tokenizer, scene)
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


@torch.inference_mode()
def _panels(encoder: DualEncoder, tokenizer: CaptionTokenizer, scene: Scene) -> list[Panel]:
    device = next(encoder.parameters()).device
    root, *phrases = scene.tree.nodes
    boxes = {(span.start, span.end): box for span, box in scene.phrase_boxes}
    _, patches = encoder.encode_patches(scene_images(encoder, [scene]).to(device))
    queries = torch.cat(
        [
            text_queries(encoder, tokenizer, [scene.caption]),
            word_queries(encoder, tokenizer, [scene.caption], [Tree(scene.tree.leaves, tuple(phrases))]),
        ]
    )
    heat = patch_similarity(patches, queries).unflatten(1, encoder.grid).cpu()
    panels = [Panel("whole caption", heat[0], boxes.get((root.start, root.end)))]
    for node, values in zip(phrases, heat[1:], strict=True):
        phrase = scene.caption[node.start : node.end]
        panels.append(Panel(phrase, values, boxes.get((node.start, node.end))))
    return panels
