"""What the methods that mask clusters share: CLIP's loss on the patches that are far from randomly drawn anchors.

Axes: C images · N patches
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.encoders.selector import PatchContext, Selection
from powerclip.encoders.vision import embed_image
from powerclip.objectives.base import Plan
from powerclip.objectives.clip import Clip
from powerclip.objectives.selection.clusters import kept_count, mask_near
from powerclip.runtime.distributed import SINGLE, Ranks

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder
    from powerclip.objectives.clip_pgs import ClipPgsSettings
    from powerclip.objectives.e_clip import EClipSettings

# Images whose similarities, N² each, are formed at a time: 160 MB for 196 patches.
BLOCK = 1024


class MaskedClip(Clip):
    """CLIP's loss of images without some of their clusters."""

    settings: EClipSettings | ClipPgsSettings

    def noise_shape(self, encoder: DualEncoder) -> tuple[int, ...] | None:
        """Two numbers for each patch: for the anchors, and for what is dropped."""
        return 2, encoder.grid[0] * encoder.grid[1]

    def plan(self, encoder: DualEncoder, images: Tensor, noise: Tensor, ranks: Ranks = SINGLE) -> Plan:
        """Choose the patches that stay; one threshold for the images of all ranks."""
        near, protected = [], []
        for some, drawn in zip(images.split(BLOCK), noise[:, 0].split(BLOCK), strict=True):
            _, patches = embed_image(encoder.clip.visual, some)
            similar, spared = self.look(PatchContext(some, patches), encoder.grid, drawn)
            near.append(similar)
            protected += [] if spared is None else [spared]
        chosen = self.choose(torch.cat(near), torch.cat(protected) if protected else None, noise[:, 1], ranks)
        return Plan(kept=chosen.kept, shown=chosen.shown)

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
    def look(self, context: PatchContext, grid: tuple[int, int], noise: Tensor) -> tuple[Tensor, Tensor | None]:
        """Draw anchors by `noise` [C, N]; each patch's similarity [C, N] to the nearest, and which are spared."""
