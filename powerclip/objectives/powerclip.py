"""PowerCLIP: CLIP's loss plus powerset alignment of image regions with caption phrases.

"PowerCLIP: Powerset Alignment for Contrastive Pre-Training", CVPR 2026.

    L = L_CLIP + λ · L_align,   L_align = Φγ(S̄) + Φγ(S̄ᵀ) as printed, or a softmax over S̄

The settings are those of `AlignmentConfig`; `preset: paper` is what the paper prints.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.embed import embed_parts
from powerclip.alignment.loss import alignment_loss
from powerclip.objectives.base import Objective, Terms
from powerclip.objectives.clip import clip_loss
from powerclip.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import Features


class PowerClip(Objective):
    """CLIP's loss and the alignment loss, weighted."""

    def __init__(self, config: AlignmentConfig | None = None):
        super().__init__()
        self.config = config or AlignmentConfig()
        # The triplet loss has no scale to learn.
        learned = self.config.loss == "softmax"
        self.log_scale = nn.Parameter(torch.tensor(math.log(self.config.scale))) if learned else None

    def loss(self, features: Features, batch: Batch, ranks: Ranks = ALONE) -> Terms:
        """CLIP's loss plus the weighted alignment loss."""
        clip = clip_loss(features.image, features.text, features.logit_scale, ranks)
        # Arguments reach ±1e4 at τ = 0.001: bf16 would keep three digits of them.
        with torch.autocast(features.patches.device.type, enabled=False):
            parts = embed_parts(features.patches, batch.regions, features.words, batch.phrases, self.config, ranks)
            scale = None if self.log_scale is None else self.log_scale.exp()
            align = alignment_loss(parts, self.config, scale, ranks)
        logged = {
            "clip": clip,
            "alignment": align.loss,
            "violation": align.violation,
            "empty": align.empty,
            "positive": align.positive,
            "negative": align.negative,
        }
        if self.log_scale is not None:
            logged["alignment_scale"] = self.log_scale.exp()
        total = clip + self.config.weight * align.loss
        return Terms(total, {name: value.detach() for name, value in logged.items()})

    def clamp(self) -> None:
        """Keep the softmax's scale at 100 or below, as CLIP keeps its own."""
        if self.log_scale is not None:
            with torch.no_grad():
                self.log_scale.clamp_(max=math.log(100))
