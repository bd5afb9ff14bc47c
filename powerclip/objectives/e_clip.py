"""E-CLIP: CLIP on images from which whole clusters of similar patches are gone.

Wei et al., "Efficient Vision-Language Pre-training by Cluster Masking", CVPR 2024.

    L = L_CLIP(x(patches p with max_a S_ap ≤ θ), y),   S = cosine of pixel-normalised patches, a over random anchors

Defaults: 3 % of the patches are anchors; θ is the threshold at which half of all patches of a batch are masked; at
least 30 % of every image is masked (137 of 196 patches are left at most). With `embedding: true` the similarity becomes
e · S_embedding + (1 − e) · S, e being the share of the run that is done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.encoders.selector import PatchContext
from powerclip.objectives.cluster_masking import (
    MaskedClip,
    anchor_count,
    anchor_similarity,
    draw_anchors,
    embedding_similarity,
    pixel_similarity,
)
from powerclip.settings import PositiveShare, Share, validate


@dataclass(frozen=True)
class EClipSettings:
    """How E-CLIP masks."""

    anchors: PositiveShare = 0.03  # share of the patches that are drawn as anchors
    ratio: Share = 0.5  # share of a batch's patches that is masked, by choice of the threshold
    least: Share = 0.3  # smallest share of an image that is masked
    threshold: float | None = None  # a fixed threshold of the similarity, in place of ratio
    embedding: bool = False  # whether similarity moves from pixels to embeddings during the run

    def __post_init__(self) -> None:
        validate(self, "objective_settings")


class EClip(MaskedClip):
    """CLIP's loss of images without some of their clusters.

    Args:
        settings: how many anchors there are and how much is masked.

    Raises:
        ValueError: a setting is out of its range.

    Examples:
        >>> import torch
        >>> from powerclip.encoders import PatchContext
        >>> from powerclip.objectives import EClip, EClipSettings
        >>> flat, stripes = torch.ones(3, 2, 2), torch.tensor([1.0, -1.0]).expand(3, 2, 2)
        >>> image = torch.cat([stripes, flat, stripes], dim=2).unsqueeze(0)  # three patches in a row
        >>> noise = torch.tensor([[0.1, 0.8, 0.9]])  # the least is the anchor: the first patch
        >>> objective = EClip(EClipSettings(threshold=0.9, least=0.0))
        >>> near, _ = objective.score_patches(PatchContext(image, patches=None), grid=(1, 3), noise=noise)
        >>> near  # the anchor itself, a patch unlike it and one like it
        tensor([[   inf, 0.0000, 1.0000]])
        >>> selection = objective.choose(near, protected=None, noise=noise)
        >>> selection.kept[selection.shown]
        tensor([1])
    """

    def __init__(self, settings: EClipSettings | None = None) -> None:
        super().__init__()
        self.settings: EClipSettings = settings or EClipSettings()

    def score_patches(
        self, context: PatchContext, grid: tuple[int, int], noise: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Similarity to anchors anywhere in the image."""
        settings = self.settings
        similarity = pixel_similarity(context.images, grid)
        if settings.embedding:
            similarity = torch.lerp(similarity, embedding_similarity(context.patches), self.elapsed)
        anchors = draw_anchors(noise, anchor_count(noise.shape[1], settings.anchors))
        return anchor_similarity(similarity, anchors), None
