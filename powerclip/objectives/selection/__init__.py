"""Which patches of an image stay: small functions of tensors, one file a way of choosing.

Random choice is `powerclip.encoders.RandomPatches`.
"""

from powerclip.objectives.selection.attentive import kept_cells, resample_scores, select_attentive
from powerclip.objectives.selection.clusters import (
    anchor_count,
    anchor_similarity,
    draw_anchors,
    kept_count,
    mask_near,
    search_threshold,
)
from powerclip.objectives.selection.edges import edge_strength
from powerclip.objectives.selection.similarity import embedding_similarity, pixel_similarity, split_patches
from powerclip.objectives.selection.transport import balance

__all__ = [
    "anchor_count",
    "anchor_similarity",
    "balance",
    "draw_anchors",
    "edge_strength",
    "embedding_similarity",
    "kept_cells",
    "kept_count",
    "mask_near",
    "pixel_similarity",
    "resample_scores",
    "search_threshold",
    "select_attentive",
    "split_patches",
]
