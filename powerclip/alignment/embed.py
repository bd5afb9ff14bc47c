"""From dense features to the parts that are aligned: regions of the images, nodes of the captions.

Axes: C pairs of the batch · M regions · N patches · L tokens · T nodes of all captions · D width
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.phrases import Phrases, embed_leaves, embed_nodes, single_tokens
from powerclip.alignment.ragged import Segments
from powerclip.alignment.regions import embed_regions


@dataclass(frozen=True)
class Parts:
    """Embedded regions and nodes of a batch."""

    regions: Tensor  # [C, M, D] φ(I | R_m), normalised
    nodes: Tensor  # [T, D] p_B, or p_B divided by its number of leaves when similarities are means
    segments: Segments  # which caption each node belongs to


def embed_parts(patches: Tensor, masks: Tensor, words: Tensor, phrases: Phrases, config: AlignmentConfig) -> Parts:
    """Regions of patch features [C, N, D] under masks [C, M, N], and nodes of word features [C, L, D] (Eqs. 1 to 4)."""
    patches, words = patches.float(), words.float()
    if not config.parse_trees:
        phrases = single_tokens(phrases)
    if config.centre:
        # What all pictures share, and all captions, says nothing about which belong together.
        patches = patches - patches.mean((0, 1))
        words = words - words[phrases.words].mean(0)
    nodes = embed_nodes(embed_leaves(words, phrases), phrases)
    if config.similarity == "mean":
        nodes = nodes / phrases.node_sizes.unsqueeze(-1)
    return Parts(embed_regions(patches, masks), nodes, phrases.node_segments)
