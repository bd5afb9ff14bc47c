"""PowerCLIP: CLIP's loss plus powerset alignment of image regions with caption phrases.

"PowerCLIP: Powerset Alignment for Contrastive Pre-Training", CVPR 2026.

    L = L_CLIP + λ · L_align,   L_align = Φγ(S̄) + Φγ(S̄ᵀ) as printed, or a softmax over S̄

The settings are those of `AlignmentConfig`; `preset: paper` is what the paper prints.

Axes: C pairs of the batch · N patches · L tokens · D width
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.embed import embed_parts
from powerclip.alignment.loss import alignment_loss
from powerclip.alignment.negatives import annealed_count
from powerclip.objectives.base import Objective, Terms, clamp_scale, learned_scale
from powerclip.objectives.clip import clip_loss
from powerclip.runtime.distributed import SINGLE, Ranks

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import DualEncoder, Features


class PowerClip(Objective):
    """CLIP's loss and the alignment loss, weighted.

    Args:
        config: the settings of the alignment; those that learn by default.

    Raises:
        ValueError: a setting is out of its range, or does not go with another.

    Examples:
        >>> import torch
        >>> from powerclip.alignment.config import AlignmentConfig
        >>> from powerclip.data.batch import Batch
        >>> from powerclip.data.tokens import CaptionTokenizer, pack_phrases
        >>> from powerclip.data.trees import parse_bracketed
        >>> from powerclip.encoders import Features
        >>> from powerclip.objectives import PowerClip
        >>> captions = ["a dog on a chair", "two cats"]
        >>> brackets = ["(NP (NP a dog) (PP on (NP a chair)))", "(NP two cats)"]
        >>> tokenizer = CaptionTokenizer()
        >>> tokenized = [tokenizer.encode(caption) for caption in captions]
        >>> tokens = tokenizer.pad([caption.ids for caption in tokenized])
        >>> trees = [parse_bracketed(text, caption) for text, caption in zip(brackets, captions)]
        >>> regions = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)  # two on a grid of 2 × 2 patches
        >>> batch = Batch(
        ...     images=torch.zeros(2, 3, 32, 32),
        ...     tokens=tokens,
        ...     regions=regions.expand(2, -1, -1),
        ...     phrases=pack_phrases(trees, tokenized, tokens.shape[1]),
        ...     keys=["dog", "cats"],
        ... )
        >>> _ = torch.manual_seed(0)
        >>> features = Features(
        ...     image=torch.eye(2, 8),
        ...     patches=torch.randn(2, 4, 8),
        ...     text=torch.eye(2, 8),
        ...     words=torch.randn(2, tokens.shape[1], 8),
        ...     logit_scale=torch.tensor(10.0),
        ... )
        >>> terms = PowerClip(AlignmentConfig(weight=0.5)).loss(features, batch)
        >>> torch.equal(terms.total, terms.parts["clip"] + 0.5 * terms.parts["alignment"])
        True
    """

    def __init__(self, config: AlignmentConfig | None = None):
        super().__init__()
        self.config = config or AlignmentConfig()
        # The triplet loss has no scale to learn.
        learned = self.config.loss == "softmax"
        self.log_scale = learned_scale(self.config.scale) if learned else None
        self.projections: nn.ParameterDict | None = None  # of patches and words, when they have their own
        self.done = 0.0  # `elapsed` as the host knows it: how many negatives count needs no device sync

    def attach(self, encoder: DualEncoder) -> None:
        """Make the matrices [D, D] of `projection: separate`; they start as the identity, which changes nothing."""
        if self.config.projection == "separate":
            width = encoder.embed_dim
            matrices = {side: nn.Parameter(torch.eye(width)) for side in ("patches", "words")}
            self.projections = nn.ParameterDict(matrices)

    def progress(self, step: int, steps: int) -> None:
        """Note that `step` of `steps` updates are done."""
        super().progress(step, steps)
        self.done = step / steps

    def loss(self, features: Features, batch: Batch, ranks: Ranks = SINGLE) -> Terms:
        """CLIP's loss plus the weighted alignment loss."""
        clip = clip_loss(features.image, features.text, features.logit_scale, ranks)
        # Arguments reach ±1e4 at τ = 0.001: bf16 would keep three digits of them.
        with torch.autocast(features.patches.device.type, enabled=False):
            patches, words = self._aligned(features)
            parts = embed_parts(patches, batch.regions, words, batch.phrases, self.config, ranks)
            scale = None if self.log_scale is None else self.log_scale.exp()
            k = annealed_count(len(patches) * ranks.count, self.done) if self.config.anneal else None
            align = alignment_loss(parts, self.config, scale, ranks, k)
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
        weight: Tensor | float = self.config.weight
        if self.config.ramp:
            weight = logged["weight"] = self.config.weight * (self.elapsed / self.config.ramp).clamp(max=1)
        if k is not None:
            logged["k"] = torch.full((), float(k), device=clip.device)
        total = clip + weight * align.loss
        return Terms(total, {name: value.detach() for name, value in logged.items()})

    def _aligned(self, features: Features) -> tuple[Tensor, Tensor]:
        """Patches [C, N, D] and words [C, L, D] as the alignment sees them: who learns from it, and in which space."""
        patches, words = features.patches, features.words
        if self.config.trains == "text":
            patches = patches.detach()
        if self.config.trains == "image":
            words = words.detach()
        if self.config.projection == "separate":
            if self.projections is None:
                raise ValueError("alignment.projection: separate needs attach(encoder), which makes the matrices")
            patches = patches.float() @ self.projections["patches"]
            words = words.float() @ self.projections["words"]
        return patches, words

    def clamp(self) -> None:
        """Keep the softmax's scale at 100 or below, as CLIP keeps its own."""
        if self.log_scale is not None:
            clamp_scale(self.log_scale)
