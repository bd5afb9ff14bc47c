"""From dense features to the parts that are aligned: regions of the images, nodes of the captions.

Axes: C pairs of the batch · M regions · N patches · L tokens · T nodes of all captions · D width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.phrases import Phrases, embed_leaves, embed_nodes, single_tokens
from powerclip.alignment.ragged import Segments
from powerclip.alignment.regions import embed_regions
from powerclip.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Parts:
    """Embedded regions and nodes of a batch."""

    regions: Tensor  # [C, M, D] φ(I | R_m), normalised
    nodes: Tensor  # [T, D] p_B, or p_B divided by its number of leaves when similarities are means
    segments: Segments  # which caption each node belongs to


def embed_parts(
    patches: Tensor, masks: Tensor, words: Tensor, phrases: Phrases, config: AlignmentConfig, ranks: Ranks = ALONE
) -> Parts:
    """Regions of patch features [C, N, D] under masks [C, M, N], and nodes of word features [C, L, D] (Eqs. 1 to 4).

    Where a batch is spread over `ranks`, each has its own rows of all of them; means are those of the whole batch.
    """
    words = words.float()
    if not config.parse_trees:
        phrases = single_tokens(phrases)
    centre = None
    if config.centre != "none":
        # What all captions share says nothing about which picture is theirs; the same for all pictures, and for all
        # patches of one picture.
        over = (0, 1) if config.centre == "batch" else 1
        centre = patches.mean(over, keepdim=True, dtype=torch.float32)
        if config.centre == "batch":
            centre = ranks.mean(centre)
        # Selected, not indexed: the number of words is not asked of the GPU.
        total = torch.where(phrases.words.unsqueeze(-1), words, 0.0).sum((0, 1))
        words = words - ranks.sum(total) / ranks.sum(phrases.words.sum())
    nodes = embed_nodes(embed_leaves(words, phrases), phrases)
    if config.similarity == "mean":
        nodes = nodes / phrases.node_sizes.unsqueeze(-1)
    return Parts(embed_regions(patches, masks, centre), nodes, phrases.node_segments)
