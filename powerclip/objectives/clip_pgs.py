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
import torch.nn.functional as F
from torch import Tensor

from powerclip.encoders.selector import PatchContext
from powerclip.objectives.cluster_masking import (
    MaskedClip,
    anchor_count,
    anchor_similarity,
    draw_anchors,
    embedding_similarity,
    pixel_similarity,
    split_patches,
)
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
    """CLIP's loss of images without some of their clusters, edges spared.

    Args:
        settings: how many anchors there are, how much is masked and what an edge is.

    Raises:
        ValueError: a setting is out of its range.

    Examples:
        >>> import torch
        >>> from powerclip.objectives.clip_pgs import balance, edge_strength
        >>> image = torch.zeros(1, 3, 4, 4)
        >>> image[..., 2:] = 1.0  # dark on the left, bright on the right
        >>> edge_strength(image, grid=(1, 4)).round(decimals=2)  # of four patches in a row, those in the middle
        tensor([[0., 1., 1., 0.]])
        >>> similarity = torch.tensor([[[1.0, 0.8, 0.8], [0.8, 1.0, 0.1], [0.8, 0.1, 1.0]]])
        >>> balance(similarity).round(decimals=2)  # the first patch is like everything, and gets less for it
        tensor([[[0.7800, 0.1100, 0.1100],
                 [0.1100, 0.8900, 0.0000],
                 [0.1100, 0.0000, 0.8900]]])
    """

    def __init__(self, settings: ClipPgsSettings | None = None) -> None:
        super().__init__()
        self.settings: ClipPgsSettings = settings or ClipPgsSettings()

    def score_patches(
        self, context: PatchContext, grid: tuple[int, int], noise: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Similarity to anchors that are no edges, and the edges."""
        settings = self.settings
        pixels, embeddings = pixel_similarity(context.images, grid), embedding_similarity(context.patches)
        similarity = torch.lerp(pixels, embeddings, self.elapsed)
        if settings.iterations:
            similarity = balance(similarity, settings.epsilon, settings.iterations)
        edges = edge_strength(context.images, grid) > settings.edge
        anchors = draw_anchors(noise, anchor_count(noise.shape[1], settings.anchors), edges)
        return anchor_similarity(similarity, anchors, edges), edges


def balance(similarity: Tensor, epsilon: float = 0.1, iterations: int = 50) -> Tensor:
    """The entropic transport plan [C, N, N] of a symmetric similarity: rows and columns sum to 1.

    Sinkhorn's iteration on K = exp(S/ε). Raw similarities cannot be normalised by their sums, as some are negative. K
    is symmetric, so both scalings are one vector, and the geometric mean of two half-steps converges to it with one
    product an iteration.
    """
    with torch.autocast(similarity.device.type, enabled=False):
        # Shifted to a largest entry of 1: a common factor changes no plan.
        kernel = ((similarity.float() - similarity.float().amax(dim=(1, 2), keepdim=True)) / epsilon).exp()
        scale = kernel.sum(dim=-1, keepdim=True).rsqrt()  # [C, N, 1]
        for _ in range(iterations):
            scale = (scale / (kernel @ scale)).sqrt()
        return scale * kernel * scale.transpose(1, 2)


def edge_strength(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sobel's gradient of the patch means, from 0 to 1 in each image [C, N]; 0 everywhere in an image without edges."""
    means = split_patches(images.float(), grid).mean(dim=-1).unflatten(1, grid)
    # The border is continued: zeros around the image would make an edge of it.
    m = F.pad(means.unsqueeze(1), (1, 1, 1, 1), mode="replicate").squeeze(1)
    rows = m[:, :-2] + 2 * m[:, 1:-1] + m[:, 2:]
    columns = m[:, :, :-2] + 2 * m[:, :, 1:-1] + m[:, :, 2:]
    strength = torch.hypot(rows[:, :, 2:] - rows[:, :, :-2], columns[:, 2:] - columns[:, :-2]).flatten(1)
    low, high = strength.amin(dim=1, keepdim=True), strength.amax(dim=1, keepdim=True)
    return (strength - low) / (high - low + 1e-6)
