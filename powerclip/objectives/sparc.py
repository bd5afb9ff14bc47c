"""SPARC: CLIP plus a contrast, within each caption, between its tokens and the patches that each one gathers.

Bica et al., "Improving fine-grained understanding in image-text pre-training", ICML 2024.

    s_ln = ⟨t_l, v_n⟩,   ŝ_ln = (s_ln − min_n s_ln) / (max_n s_ln − min_n s_ln),   ŝ_ln ← 0 where ŝ_ln < 1/N
    g_l = Σ_n ŝ_ln v_n / Σ_n ŝ_ln
    L_local = ½ mean_i mean_l [ −log softmax_k(c · ⟨ĝ_l, t̂_k⟩)_l − log softmax_k(c · ⟨t̂_l, ĝ_k⟩)_l ]
    L = w_global · L_CLIP + w_local · L_local

Hats on vectors: normalised. k runs over the tokens of the same caption, so only matched pairs are ever formed: C·L·N
similarities. Defaults: w_global 0.5, w_local 1; c is learned, from 1/0.07; start and end of text take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.objectives.base import Objective, Terms, clamp_scale, learned_scale, real_tokens
from powerclip.objectives.clip import clip_loss
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.settings import NonNegativeFloat, PositiveFloat, validate

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import Features


@dataclass(frozen=True)
class SparcSettings:
    """What SPARC adds up."""

    global_weight: NonNegativeFloat = 0.5  # weight of CLIP's own loss
    local_weight: NonNegativeFloat = 1.0  # weight of the loss between tokens and their groups of patches
    scale: PositiveFloat = 14.3  # c, the learned scale of the local softmax, at the start
    ends: bool = True  # whether the tokens for start and end of text take part

    def __post_init__(self) -> None:
        validate(self, "objective_settings")


def group_patches(words: Tensor, patches: Tensor) -> Tensor:
    """g [C, L, D]: for each token [C, L, D] the mean of the patches [C, N, D], weighted by sparse similarity."""
    similarity = words @ patches.transpose(1, 2)  # [C, L, N]
    low, high = similarity.amin(dim=-1, keepdim=True), similarity.amax(dim=-1, keepdim=True)
    # A token that is equally like all patches has no range; it gathers nothing.
    weight = (similarity - low) / (high - low).clamp(min=1e-6)
    weight = torch.where(weight < 1 / patches.shape[1], 0.0, weight)
    return weight / weight.sum(dim=-1, keepdim=True).clamp(min=1e-6) @ patches


def sparc_loss(words: Tensor, patches: Tensor, real: Tensor, scale: Tensor) -> Tensor:
    """The local loss, L_local above: a mean over pairs, and so over ranks.

    Args:
        words: [C, L, D] tokens. What `real` leaves out may be anything, even NaN.
        patches: [C, N, D]; row i is matched with row i of `words`.
        real: [C, L] bool, the tokens that count; at least one in each caption.
        scale: c, a scalar.

    Raises:
        ValueError: images, captions and mask are not of the same pairs.

    Examples:
        >>> import torch
        >>> from powerclip.objectives.sparc import sparc_loss
        >>> words = torch.eye(2).unsqueeze(0)  # one caption of two tokens
        >>> patches = 3 * torch.eye(2).unsqueeze(0)  # each has a patch of its own
        >>> real = torch.ones(1, 2, dtype=torch.bool)
        >>> sparc_loss(words, patches, real, scale=torch.tensor(2.0))
        tensor(0.1269)
        >>> sparc_loss(words, torch.ones(1, 2, 2), real, scale=torch.tensor(2.0))  # patches that tell nothing
        tensor(0.6931)
    """
    if len(patches) != len(words) or real.shape != words.shape[:2]:
        raise ValueError(f"{len(patches)} images, tokens {list(words.shape[:2])}, mask {list(real.shape)}: no pairs")
    words = torch.where(real.unsqueeze(-1), words.float(), 0.0)  # padding may hold NaN
    grouped = group_patches(words, patches.float())
    logits = scale * F.normalize(grouped, dim=-1) @ F.normalize(words, dim=-1).transpose(1, 2)  # [C, L, L]
    lowest = torch.finfo(logits.dtype).min  # not −inf: a padded row would be NaN, and its gradient with it
    loss = torch.zeros((), device=logits.device)
    for part in (logits, logits.transpose(1, 2)):
        log_probs = part.masked_fill(~real.unsqueeze(1), lowest).log_softmax(dim=-1).diagonal(dim1=1, dim2=2)
        log_likelihood = torch.where(real, log_probs, 0.0).sum(dim=1) / real.sum(dim=1)
        loss = loss - log_likelihood.mean()
    return loss / 2


class Sparc(Objective):
    """CLIP's loss and the local one, weighted."""

    def __init__(self, settings: SparcSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or SparcSettings()
        self.log_scale = learned_scale(self.settings.scale)

    def loss(self, features: Features, batch: Batch, ranks: Ranks = SINGLE) -> Terms:
        """The weighted sum of both losses; the local one is a mean over pairs, and so over ranks."""
        clip = clip_loss(features.image, features.text, features.logit_scale, ranks)
        real = real_tokens(batch.tokens, self.settings.ends)
        # Similarities that carry a gradient are float32, whatever is around.
        with torch.autocast(features.patches.device.type, enabled=False):
            local = sparc_loss(features.words, features.patches, real, self.log_scale.exp())
        total = self.settings.global_weight * clip + self.settings.local_weight * local
        return Terms(
            total, {"clip": clip.detach(), "local": local.detach(), "local_scale": self.log_scale.detach().exp()}
        )

    def clamp(self) -> None:
        """Keep the local scale at 100 or below, as CLIP keeps its own."""
        clamp_scale(self.log_scale)
