"""CLIP: symmetric cross-entropy over global embeddings with a learned temperature.

Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021.

    L = ½ Σ_i [ −log softmax_j(s · ⟨x_i, y_j⟩)_i − log softmax_j(s · ⟨x_j, y_i⟩)_i ] / C
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.objectives.base import Objective, Terms

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import Features


def clip_loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    """The contrastive loss of C matched, normalised embeddings [C, D]."""
    logits = scale.float() * image.float() @ text.float().T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class Clip(Objective):
    """The baseline that every other method adds to."""

    def loss(self, features: Features, batch: Batch) -> Terms:
        """CLIP's loss alone."""
        loss = clip_loss(features.image, features.text, features.logit_scale)
        return Terms(loss, {"clip": loss.detach()})
