"""What every training objective has in common: encode a batch, then turn its features into a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import DualEncoder, Features


@dataclass
class Terms:
    """A loss and the scalars to log beside it."""

    total: Tensor  # carries the gradient
    parts: dict[str, Tensor] = field(default_factory=dict)  # detached


class Objective(nn.Module):
    """A method of the paper's tables. Split in two so that features can be gathered, or cached, in between."""

    def encode(self, encoder: DualEncoder, images: Tensor, tokens: Tensor) -> Features:
        """Run the towers as this objective needs them, on images [C, 3, H, W] and tokens [C, L]."""
        return encoder(images, tokens)

    def loss(self, features: Features, batch: Batch) -> Terms:
        """The loss of encoded features; each objective has its own."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    def clamp(self) -> None:
        """Bring learned scales back into their range, after a step of the optimiser."""

    def forward(self, encoder: DualEncoder, batch: Batch) -> Terms:
        """Encode, then compute the loss."""
        return self.loss(self.encode(encoder, batch.images, batch.tokens), batch)


def encode(objective: Objective, encoder: DualEncoder, images: Tensor, tokens: Tensor) -> Features:
    """`objective.encode` as a function: with both modules as arguments, what is compiled for one pair fits the next."""
    return objective.encode(encoder, images, tokens)
