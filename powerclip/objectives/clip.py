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
from powerclip.runtime.distributed import SINGLE, Ranks

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import Features


def clip_loss(image: Tensor, text: Tensor, scale: Tensor, ranks: Ranks = SINGLE) -> Tensor:
    """The contrastive loss of C matched pairs, as the equation above says.

    Each of several ranks contrasts its images with all captions and its captions with all images.

    Args:
        image: [C, D] normalised embeddings; row i is matched with row i of `text`.
        text: [C, D] normalised embeddings.
        scale: s, a scalar: the inverse of the temperature.
        ranks: the ranks that have the other pairs of the batch.

    Raises:
        ValueError: images and captions are not of one number and one width.

    Examples:
        >>> import torch
        >>> from powerclip.objectives.clip import clip_loss
        >>> scale = torch.tensor(2.0)
        >>> clip_loss(torch.eye(2), torch.eye(2), scale)  # each image is like its own caption alone
        tensor(0.1269)
        >>> clip_loss(torch.eye(2), torch.eye(2).flip(0), scale)  # and here like the other one
        tensor(2.1269)
    """
    if image.shape != text.shape:
        raise ValueError(f"images {list(image.shape)} and captions {list(text.shape)} are no pairs")
    image, text, scale = image.float(), text.float(), scale.float()
    to_text = scale * image @ ranks.gather(text).T
    to_image = to_text.T if ranks.is_single else scale * text @ ranks.gather(image).T
    labels = torch.arange(len(image), device=image.device) + ranks.rows(len(image)).start
    return (F.cross_entropy(to_text, labels) + F.cross_entropy(to_image, labels)) / 2


class Clip(Objective):
    """The baseline that every other method adds to."""

    dense = False

    def loss(self, features: Features, batch: Batch, ranks: Ranks = SINGLE) -> Terms:
        """CLIP's loss alone."""
        loss = clip_loss(features.image, features.text, features.logit_scale, ranks)
        return Terms(loss, {"clip": loss.detach()})
