"""FLIP: CLIP on a random half of each image's patches, then a short while on whole images.

Li et al., "Scaling Language-Image Pre-training via Masking", CVPR 2023.

    L = L_CLIP(x(random n of N patches), y),   n = keep · N,   n = N in the last steps

Each image draws its own patches; positions are added before the draw; captions are whole. Defaults: half of the patches
stay; the last hundredth of the run sees whole images at a hundredth of the learning rate, as 0.32 epochs after 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from powerclip.encoders.selector import RandomPatches
from powerclip.objectives.base import Phase, Plan
from powerclip.objectives.clip import Clip
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.settings import NonNegativeFloat, PositiveShare, Share, validate

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder


@dataclass(frozen=True)
class FlipSettings:
    """How much of an image FLIP sees, and when."""

    keep: PositiveShare = 0.5  # share of the patches that stay
    tuning: Share = 0.01  # share of the steps, at the end, that see whole images
    tuning_rate: NonNegativeFloat = 0.01  # learning rate of those steps, as a share of the recipe's

    def __post_init__(self) -> None:
        validate(self, "objective_settings")


class Flip(Clip):
    """CLIP's loss of masked images.

    Args:
        settings: how many patches stay, and how long whole images are seen at the end.

    Raises:
        ValueError: a setting is out of its range.

    Examples:
        >>> import torch
        >>> from powerclip.objectives import Flip, FlipSettings
        >>> objective = Flip(FlipSettings(keep=0.5, tuning=0.1))
        >>> noise = torch.tensor([[0.9, 0.1, 0.5, 0.3]])  # a number for each of four patches
        >>> objective.plan(encoder=None, images=None, noise=noise).kept
        tensor([[0, 2]])
        >>> objective.phase(step=95, steps=100)  # whole images, at a hundredth of the learning rate
        Phase(start=90, end=100, rate=0.01)
    """

    def __init__(self, settings: FlipSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or FlipSettings()
        self.masking = True

    def phase(self, step: int, steps: int) -> Phase:
        """Masked steps first, unmasked tuning at the end."""
        start = steps - round(self.settings.tuning * steps)
        return Phase(0, start) if step < start else Phase(start, steps, self.settings.tuning_rate)

    def progress(self, step: int, steps: int) -> None:
        """Stop masking once tuning begins; compiled towers are compiled a second time for it."""
        super().progress(step, steps)
        self.masking = step < steps - round(self.settings.tuning * steps)

    def noise_shape(self, encoder: DualEncoder) -> tuple[int, ...] | None:
        """A number for each patch, unless this is the tuning phase."""
        return (encoder.grid[0] * encoder.grid[1],) if self.masking else None

    def plan(self, encoder: DualEncoder, images: Tensor, noise: Tensor, ranks: Ranks = SINGLE) -> Plan:
        """The patches with the highest numbers [C, N] stay."""
        return Plan(kept=RandomPatches(self.settings.keep).choose(noise))
