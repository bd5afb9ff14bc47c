"""CLIP-PGS: cluster masking with balanced similarities that spares edges ("patch generation-to-selection").

Pei et al., "Seeing What Matters: Empowering CLIP with Patch Generation-to-Selection", CVPR 2025.

    S = Sinkhorn(e · S_embedding + (1 − e) · S_pixels),   e = share of the run that is done
    L = L_CLIP(x(patches p that are edges or have max_a S_ap ≤ θ), y),   a over random anchors that are no edges

Edges are patches whose Sobel gradient, on the grid of patch means, is more than half the image's largest. Defaults: 5 %
of the patches are anchors; θ is the threshold at which half of all patches of a batch are masked; at least `least` of
every image is masked: 0.3, or 0.5 in the paper's second variant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.encoders.selector import PatchContext
from powerclip.objectives.masked import MaskedClip
from powerclip.objectives.selection.clusters import anchor_count, anchor_similarity, draw_anchors
from powerclip.objectives.selection.edges import edge_strength
from powerclip.objectives.selection.similarity import embedding_similarity, pixel_similarity
from powerclip.objectives.selection.transport import balance
from powerclip.settings import NonNegativeInt, PositiveFloat, PositiveShare, Share, validate


@dataclass(frozen=True)
class ClipPgsSettings:
    """How CLIP-PGS masks."""

    anchors: PositiveShare = 0.05  # share of the patches that are drawn as anchors
    ratio: Share = 0.5  # share of a batch's patches that is masked, by choice of the threshold
    least: Share = 0.3  # smallest share of an image that is masked: 0.3 or 0.5 in the paper
    threshold: float | None = None  # a fixed threshold of the balanced similarity, in place of ratio
    edge: Share = 0.5  # gradient, as a share of the image's largest, above which a patch is an edge; 1: none is
    epsilon: PositiveFloat = 0.1  # entropy of the transport plan: the larger, the more alike all patches become
    iterations: NonNegativeInt = 50  # Sinkhorn's iterations; 0 leaves the similarity as it is

    def __post_init__(self) -> None:
        validate(self, "objective_settings")


class ClipPgs(MaskedClip):
    """CLIP's loss of images without some of their clusters, edges spared."""

    def __init__(self, settings: ClipPgsSettings | None = None) -> None:
        super().__init__()
        self.settings: ClipPgsSettings = settings or ClipPgsSettings()

    def look(self, context: PatchContext, grid: tuple[int, int], noise: Tensor) -> tuple[Tensor, Tensor | None]:
        """Similarity to anchors that are no edges, and the edges."""
        settings = self.settings
        pixels, embeddings = pixel_similarity(context.images, grid), embedding_similarity(context.patches)
        similarity = torch.lerp(pixels, embeddings, self.elapsed)
        if settings.iterations:
            similarity = balance(similarity, settings.epsilon, settings.iterations)
        edges = edge_strength(context.images, grid) > settings.edge
        anchors = draw_anchors(noise, anchor_count(noise.shape[1], settings.anchors), edges)
        return anchor_similarity(similarity, anchors, edges), edges
