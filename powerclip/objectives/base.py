"""What every training objective has in common: encode a batch, then turn its features into a loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from powerclip.encoders.features import Features
from powerclip.encoders.vision import dropout_selector
from powerclip.objectives.plan import Draws, Plan
from powerclip.runtime.distributed import SINGLE, Ranks

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import DualEncoder


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

    A run calls `attach` once, before the optimiser is made, then for each step `progress`, `draw`, `plan`, `encode`,
    `loss`, and after the update `clamp` and `after_step`. What is random or concerns the batch as a whole belongs into
    `draw`, `plan` and `loss`: `encode` may see a batch in parts, and twice. Parameters of an objective are used by its
    `loss` alone: there the whole batch is at hand.
    """

    dense = True  # whether the loss looks at patches and words: what it does not need is not kept
    features: type[Features] = Features  # what `encode` gives

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

    def draw(self, encoder: DualEncoder, count: int, draws: Draws) -> Tensor | None:
        """The random numbers [C, …] that `count` images need; None when nothing is random."""
        if not encoder.training or dropout_selector(encoder.clip.visual) is None:
            return None
        return draws(count, encoder.grid[0] * encoder.grid[1])

    def plan(self, encoder: DualEncoder, images: Tensor, noise: Tensor | None, ranks: Ranks = SINGLE) -> Plan:
        """What is done with images [C, 3, H, W], given what was drawn for them.

        `images` are all those of this rank; what the other ranks' images have to say is asked of `ranks`.
        """
        dropout = dropout_selector(encoder.clip.visual)
        return Plan() if noise is None or dropout is None else Plan(kept=dropout.choose(noise))

    def encode(
        self, encoder: DualEncoder, images: Tensor, tokens: Tensor | tuple[Tensor, ...], plan: Plan | None = None
    ) -> Features:
        """Run the towers as this objective needs them, on images [C, 3, H, W] and tokens [C, L].

        Without the plan of these images one is made.
        """
        if plan is None:
            plan = self.plan_alone(encoder, images)
        of_images = self.encode_images(encoder, images, plan)
        return self.join(encoder, of_images, encoder.encode_words(tokens, dense=self.dense))

    def encode_images(self, encoder: DualEncoder, images: Tensor, plan: Plan) -> dict[str, Any]:
        """The image tower's part of `encode`: fields of the features."""
        return encoder.image_features(images, None if plan.kept is None else plan.select, dense=self.dense)

    def join(self, encoder: DualEncoder, of_images: Mapping[str, Any], of_captions: tuple[Tensor, Tensor]) -> Features:
        """The features of a batch from what each tower gave."""
        text, words = of_captions
        return self.features(**of_images, text=text, words=words, **encoder.scales())

    def plan_alone(self, encoder: DualEncoder, images: Tensor) -> Plan:
        """A plan for images that are the whole batch, drawn with torch's own generator."""
        return self.plan(encoder, images, self.draw(encoder, len(images), Draws(images.device, None, SINGLE)), SINGLE)

    def loss(self, features: Features, batch: Batch, ranks: Ranks = SINGLE) -> Terms:
        """The loss of encoded features; each objective has its own.

        On several ranks, features and batch are this one's, and the mean over ranks is the loss of the whole batch.
        """
        raise TypeError(f"{type(self).__name__} defines no loss")

    def clamp(self) -> None:
        """Bring learned scales back into their range, after a step of the optimiser."""

    def after_step(self, encoder: DualEncoder) -> None:
        """Follow the towers, after a step of the optimiser."""

    def forward(self, encoder: DualEncoder, batch: Batch) -> Terms:
        """Encode, then compute the loss."""
        return self.loss(self.encode(encoder, batch.images, batch.tokens), batch)


def encode(
    objective: Objective,
    encoder: DualEncoder,
    images: Tensor,
    tokens: Tensor | tuple[Tensor, ...],
    plan: Plan | None = None,
) -> Features:
    """`objective.encode` as a function: with both modules as arguments, what is compiled for one pair fits the next."""
    return objective.encode(encoder, images, tokens, plan)
