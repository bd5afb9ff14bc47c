"""Cluster masking, as E-CLIP and CLIP-PGS do it: a few anchors are drawn, and the patches like one of them are masked.

Wei et al., "Efficient Vision-Language Pre-training by Cluster Masking", CVPR 2024.

Axes: C images · N patches · A anchors · n patches that stay · D width
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.encoders.selector import PatchContext, Selection
from powerclip.encoders.vision import embed_image
from powerclip.objectives.base import Plan
from powerclip.objectives.clip import Clip
from powerclip.runtime.distributed import SINGLE, Ranks

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder
    from powerclip.objectives.clip_pgs import ClipPgsSettings
    from powerclip.objectives.e_clip import EClipSettings

# Images whose similarities, N² each, are formed at a time: 160 MB for 196 patches.
BLOCK = 1024
# The threshold is known to 2^-24 of the range of the scores: below that float32 does not tell patches apart.
SEARCH_STEPS = 24


class MaskedClip(Clip):
    """CLIP's loss of images without some of their clusters."""

    settings: EClipSettings | ClipPgsSettings

    def noise_shape(self, encoder: DualEncoder) -> tuple[int, ...] | None:
        """Two numbers for each patch: for the anchors, and for what is dropped."""
        return 2, encoder.grid[0] * encoder.grid[1]

    def plan(self, encoder: DualEncoder, images: Tensor, noise: Tensor, ranks: Ranks = SINGLE) -> Plan:
        """Choose the patches that stay; one threshold for the images of all ranks."""
        near, protected = [], []
        for block, block_noise in zip(images.split(BLOCK), noise[:, 0].split(BLOCK), strict=True):
            _, patches = embed_image(encoder.clip.visual, block)
            similarity, block_protected = self.score_patches(PatchContext(block, patches), encoder.grid, block_noise)
            near.append(similarity)
            protected += [] if block_protected is None else [block_protected]
        selection = self.choose(torch.cat(near), torch.cat(protected) if protected else None, noise[:, 1], ranks)
        return Plan(kept=selection.kept, shown=selection.shown)

    def choose(self, near: Tensor, protected: Tensor | None, noise: Tensor, ranks: Ranks = SINGLE) -> Selection:
        """The patches that are far from every anchor."""
        settings = self.settings
        return mask_near(
            near,
            noise,
            kept_count(near.shape[1], settings.least),
            ratio=settings.ratio,
            threshold=settings.threshold,
            protected=protected,
            ranks=ranks,
        )

    @abstractmethod
    def score_patches(
        self, context: PatchContext, grid: tuple[int, int], noise: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Draw anchors by `noise` [C, N]; each patch's similarity [C, N] to the nearest, and which are spared."""


def split_patches(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """The pixels of each patch [C, N, 3·h·w] of images [C, 3, H, W]; patch (r, c) has index r · columns + c."""
    rows, columns = grid
    count, channels, height, width = images.shape
    h, w = height // rows, width // columns
    cells = images.reshape(count, channels, rows, h, columns, w)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(count, rows * columns, channels * h * w)


def pixel_similarity(images: Tensor, grid: tuple[int, int]) -> Tensor:
    """Cosines [C, N, N] between patches whose pixels have mean 0 and deviation 1 within each patch."""
    pixels = split_patches(images.float(), grid)
    variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
    return _cosines((pixels - mean) / (variance + 1e-6).sqrt())


def embedding_similarity(patches: Tensor) -> Tensor:
    """Cosines [C, N, N] between embedded patches [C, N, D]."""
    return _cosines(patches.float())


def _cosines(vectors: Tensor) -> Tensor:
    # In float32 wherever it is called: bf16 would tie patches that a threshold has to tell apart.
    with torch.autocast(vectors.device.type, enabled=False):
        unit = F.normalize(vectors, dim=-1)
        return unit @ unit.transpose(1, 2)


def anchor_count(patches: int, share: float) -> int:
    """How many anchors a share of the patches makes, rounded up: 3 % of 196 are 6, 5 % are 10."""
    return max(1, patches - int(patches * (1 - share) + 1e-6))


def kept_count(patches: int, least_masked: float) -> int:
    """The most patches that stay when at least this share is masked: 137 of 196 at 0.3."""
    return max(1, int(patches * (1 - least_masked) + 1e-6))


def draw_anchors(noise: Tensor, count: int, protected: Tensor | None = None) -> Tensor:
    """Indices [C, A] of anchors: the patches with the least `noise` [C, N], protected ones [C, N] only when needed."""
    if protected is not None:
        noise = noise + protected.to(noise.dtype)  # noise lies in [0, 1): what is protected comes last
    return noise.topk(count, dim=1, largest=False).indices


def anchor_similarity(similarity: Tensor, anchors: Tensor, protected: Tensor | None = None) -> Tensor:
    """Each patch's similarity [C, N] to the nearest anchor: infinite for anchors, −infinite for protected patches."""
    near = similarity.gather(1, anchors.unsqueeze(-1).expand(-1, -1, similarity.shape[1])).amax(dim=1)
    near = near.scatter(1, anchors, float("inf"))
    return near if protected is None else near.masked_fill(protected, float("-inf"))


def mask_near(
    near: Tensor,
    noise: Tensor,
    keep: int,
    *,
    ratio: float = 0.5,
    threshold: float | None = None,
    protected: Tensor | None = None,
    ranks: Ranks = SINGLE,
) -> Selection:
    """Mask every patch whose similarity to the nearest anchor exceeds a threshold.

    Every row has n = `keep` places. An image that shows fewer patches fills up its row with hidden ones, one that
    shows more drops the surplus at random; at least one patch is always shown. The largest number that an image of the
    batch shows would do for n, and give the same embeddings; a fixed one needs no look at the data.

    Args:
        near: [C, N] as `anchor_similarity` gives it.
        noise: [C, N] uniform in [0, 1), decides what is dropped.
        keep: most patches that an image may show.
        ratio: the share of all patches of the batch that is masked, by choice of the threshold.
        threshold: a fixed one instead.
        protected: [C, N] bool, patches that are masked only when more than `keep` are protected.
        ranks: who else has images of this batch.
    """
    # One message of C × N numbers instead of one for each step of the search.
    limit = search_threshold(ranks.gather(near), near.shape[1] - keep, ratio) if threshold is None else threshold
    masked = near > limit
    # Order of preference: protected patches, visible ones, masked ones; noise decides among equals.
    order = noise + masked
    if protected is not None:
        order = order - protected.to(noise.dtype)
    best = order.topk(keep, dim=1, largest=False).indices
    shown = ~masked.gather(1, best)
    shown = torch.cat([torch.ones_like(shown[:, :1]), shown[:, 1:]], dim=1)
    kept, positions = best.sort(dim=1)
    return Selection(kept, shown.gather(1, positions))


def search_threshold(near: Tensor, least: int, ratio: float) -> Tensor:
    """The lowest threshold at which at most `ratio` of all patches is masked, as a scalar tensor.

    `near` [C, N] are the scores, infinite for patches that are always or never masked; in every image at least `least`
    patches are masked whatever the threshold. When these, or the infinite ones, are more than `ratio` already, no
    threshold does: the highest score is given, which masks nothing else.
    """
    finite = near.isfinite()
    low = torch.where(finite, near, float("inf")).amin().clamp(max=1.0) - 1e-3
    high = torch.where(finite, near, float("-inf")).amax().clamp(min=-1.0)
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        masked = (near > middle).sum(dim=1).clamp(min=least).float().mean() / near.shape[1]
        fits = masked <= ratio
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return high
