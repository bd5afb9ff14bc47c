"""FILIP: contrast by late interaction, every patch with its best token and every token with its best patch.

Yao et al., "FILIP: Fine-grained Interactive Language-Image Pre-Training", ICLR 2022.

    s→_ij = mean_n max_l ⟨v_in, t_jl⟩,   s←_ij = mean_l max_n ⟨v_in, t_jl⟩
    L_local = ½ mean_i [ −log softmax_j(c · s→_ij)_i − log softmax_j(c · s←_ji)_i ],   L = w · L_CLIP + L_local

v and t: projected, normalised patches and tokens; l runs over the tokens that are no padding, start and end of text
among them unless `ends: false`; c is learned, from 1/0.07. FILIP itself has no L_CLIP (w = 0) and compares images and
captions by s (`powerclip evaluate --score late`); tables compare global embeddings, which L_local hardly trains: w = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.late_interaction import expand_lengths, group_lengths, late_interaction
from powerclip.objectives.base import Objective, Terms, clamp_scale, learned_scale, real_tokens
from powerclip.objectives.clip import clip_loss
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.settings import NonNegativeFloat, PositiveFloat, validate

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import Features


@dataclass(frozen=True)
class FilipSettings:
    """What FILIP compares."""

    global_weight: NonNegativeFloat = 1.0  # w, the weight of CLIP's own loss; 0 is FILIP as printed
    scale: PositiveFloat = 14.3  # c, the learned scale of the local softmax, at the start
    ends: bool = True  # whether the tokens for start and end of text take part

    def __post_init__(self) -> None:
        validate(self, "objective_settings")


def filip_loss(
    words: Tensor,
    patches: Tensor,
    real: Tensor,
    scale: Tensor,
    ranks: Ranks = SINGLE,
    lengths: Sequence[int] = (),
) -> Tensor:
    """The loss of late interaction, L_local above.

    Each of several ranks has its own pairs, and compares its images with the captions of all.

    Args:
        words: [C, L, D] tokens; normalised here. What `real` leaves out may be anything, even NaN.
        patches: [C, N, D]; row i is matched with row i of `words`.
        real: [C, L] bool, the tokens that count; at least one in each caption.
        scale: c, a scalar.
        ranks: the ranks that have the other pairs of the batch.
        lengths: tokens of each caption at most, where the host knows them: then less padding is compared.

    Raises:
        ValueError: images, captions and mask are not of the same pairs, or there is not one length for each caption.
        RuntimeError: captions are longer than `lengths` say.

    Examples:
        >>> import torch
        >>> from powerclip.objectives.filip import filip_loss
        >>> words = torch.tensor([[[1.0, 0.0], [9.0, 9.0]], [[0.0, 1.0], [9.0, 9.0]]])  # the second token is padding
        >>> patches = torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]]])
        >>> real = torch.tensor([[True, False], [True, False]])
        >>> filip_loss(words, patches, real, scale=torch.tensor(2.0))
        tensor(0.1269)
    """
    if len(patches) != len(words) or real.shape != words.shape[:2]:
        raise ValueError(f"{len(patches)} images, tokens {list(words.shape[:2])}, mask {list(real.shape)}: no pairs")
    # Normalised in float32, multiplied in the towers' precision: at bf16 the products are ten times cheaper, and each
    # similarity is a mean over many.
    unit_words = F.normalize(torch.where(real.unsqueeze(-1), words.float(), 0.0), dim=-1).to(words.dtype)
    unit_patches = F.normalize(patches.float(), dim=-1).to(words.dtype)
    count = len(patches)
    if not ranks.is_single:
        # Captions are only as long as the longest of their own rank.
        rank_lengths = ranks.numbers(real.shape[1], *group_lengths(lengths or [real.shape[1]] * count))
        missing = max(size for size, *_ in rank_lengths) - real.shape[1]
        unit_words = ranks.gather(F.pad(unit_words, (0, 0, 0, missing)))
        real = ranks.gather(F.pad(real, (0, missing)))
        lengths = [length for _, *groups in rank_lengths for length in expand_lengths(groups, count)]
    image_to_text, text_to_image = late_interaction(unit_patches, unit_words, real, lengths)  # [images, captions] both
    labels = torch.arange(count, device=real.device) + ranks.rows(count).start
    # A caption's images lie in a column, which crosses all ranks.
    logits = scale * text_to_image
    column = ranks.logsumexp(logits.logsumexp(0))[ranks.rows(count)]
    of_text = (column - logits.gather(1, labels.unsqueeze(-1)).squeeze(-1)).mean()
    return (F.cross_entropy(scale * image_to_text, labels) + of_text) / 2


class Filip(Objective):
    """The loss of late interaction, beside CLIP's."""

    def __init__(self, settings: FilipSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or FilipSettings()
        self.log_scale = learned_scale(self.settings.scale)

    def loss(self, features: Features, batch: Batch, ranks: Ranks = SINGLE) -> Terms:
        """The weighted sum of both losses."""
        clip = clip_loss(features.image, features.text, features.logit_scale, ranks)
        real = real_tokens(batch.tokens, self.settings.ends)
        with torch.autocast(features.patches.device.type, enabled=False):
            local = filip_loss(features.words, features.patches, real, self.log_scale.exp(), ranks, batch.lengths)
        total = self.settings.global_weight * clip + local
        return Terms(
            total, {"clip": clip.detach(), "local": local.detach(), "local_scale": self.log_scale.detach().exp()}
        )

    def clamp(self) -> None:
        """Keep the local scale at 100 or below, as CLIP keeps its own."""
        clamp_scale(self.log_scale)
