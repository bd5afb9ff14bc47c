"""From dense features to the parts that are aligned: regions of the images, nodes of the captions.

Axes: C pairs of the batch · M regions · N patches · L tokens · T nodes of all captions · D width
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.phrases import Phrases, leaf_rows, nodes_of_rows, single_tokens
from powerclip.alignment.pooling import normalise
from powerclip.alignment.ragged import Segments
from powerclip.alignment.regions import embed_regions
from powerclip.runtime.distributed import SINGLE, Ranks


@dataclass(frozen=True)
class Parts:
    """Embedded regions and nodes of a batch."""

    regions: Tensor  # [C, M, D] φ(I | R_m), normalised
    nodes: Tensor  # [T, D] p_B, divided by its number of leaves when similarities are means, by its length for cosines
    segments: Segments  # which caption each node belongs to


def embed_parts(
    patches: Tensor, masks: Tensor, words: Tensor, phrases: Phrases, config: AlignmentConfig, ranks: Ranks = SINGLE
) -> Parts:
    """Regions of patch features [C, N, D] under masks [C, M, N], and nodes of word features [C, L, D] (Eqs. 1 to 4).

    Where a batch is distributed over `ranks`, each has its own rows of all of them; means are those of the whole batch.
    """
    nodes, segments = embed_captions(words, phrases, config, ranks)
    return Parts(embed_regions(patches, masks, config.centre, ranks), nodes, segments)


def embed_captions(
    words: Tensor,
    phrases: Phrases,
    config: AlignmentConfig,
    ranks: Ranks = SINGLE,
    mean: Tensor | None = None,
) -> tuple[Tensor, Segments]:
    """Nodes [T, D] of word features [C, L, D], and which caption each belongs to (Eqs. 3 and 4).

    Where the settings centre, the mean word of the batch is subtracted, or another `mean` [D].
    """
    if not config.parse_trees:
        phrases = single_tokens(phrases)
    # What all captions share says nothing about which image is theirs; the same for all images, and for all
    # patches of one image.
    leaves = leaf_rows(words, phrases, centred=config.centre != "none", ranks=ranks, mean=mean)
    segments = phrases.node_segments
    nodes = nodes_of_rows(leaves, phrases, segments, mean=config.similarity == "mean")
    if config.similarity == "cosine":
        nodes = normalise(nodes)
    return nodes, segments
