"""What every training objective has in common: encode a batch, then turn its features into a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import DualEncoder, Features


@dataclass
class Terms:
    """A loss and the scalars to log beside it."""

    total: Tensor  # carries the gradient
    parts: dict[str, Tensor] = field(default_factory=dict)  # detached


@dataclass(frozen=True)
class Phase:
    """A part of a run that has a learning-rate schedule of its own."""

    start: int  # first step
    end: int  # one past its last step
    rate: float = 1.0  # its share of the recipe's learning rate


class Objective(nn.Module):
    """A method of the paper's tables. Split in two so that features can be gathered, or cached, in between.

    A run calls `attach` once, before the optimiser is made, then for each step `progress`, `encode`, `loss`, and after
    the update `clamp` and `after_step`.
    """

    elapsed: Tensor  # share of the run that is done; a tensor, so that compiled towers need not be compiled again

    def __init__(self) -> None:
        super().__init__()
        # Not part of a checkpoint: it follows from the step.
        self.register_buffer("elapsed", torch.zeros(()), persistent=False)

    def attach(self, encoder: DualEncoder) -> None:
        """Fit the objective to the towers that it will train."""

    def phase(self, step: int, steps: int) -> Phase:
        """The part of a run of `steps` steps that a step belongs to; most methods have one."""
        return Phase(0, steps)

    def progress(self, step: int, steps: int) -> None:
        """Note that `step` of `steps` updates are done."""
        self.elapsed.fill_(step / steps)

    def encode(self, encoder: DualEncoder, images: Tensor, tokens: Tensor) -> Features:
        """Run the towers as this objective needs them, on images [C, 3, H, W] and tokens [C, L]."""
        return encoder(images, tokens)

    def loss(self, features: Features, batch: Batch) -> Terms:
        """The loss of encoded features; each objective has its own."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    def clamp(self) -> None:
        """Bring learned scales back into their range, after a step of the optimiser."""

    def after_step(self, encoder: DualEncoder) -> None:
        """Follow the towers, after a step of the optimiser."""

    def forward(self, encoder: DualEncoder, batch: Batch) -> Terms:
        """Encode, then compute the loss."""
        return self.loss(self.encode(encoder, batch.images, batch.tokens), batch)


def encode(objective: Objective, encoder: DualEncoder, images: Tensor, tokens: Tensor) -> Features:
    """`objective.encode` as a function: with both modules as arguments, what is compiled for one pair fits the next."""
    return objective.encode(encoder, images, tokens)
