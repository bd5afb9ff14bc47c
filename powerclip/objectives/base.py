"""What every training objective has in common.

Axes: C images · N patches · n patches that stay · V views · L tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from powerclip.encoders.features import Features, ImageFeatures
from powerclip.encoders.selector import PatchContext, Selection
from powerclip.encoders.vision import dropout_selector
from powerclip.runtime.distributed import SINGLE, Ranks

if TYPE_CHECKING:
    from powerclip.data.batch import Batch, FurtherTexts
    from powerclip.encoders import DualEncoder


MAX_LOG_SCALE = math.log(100)  # where CLIP keeps its own


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


@dataclass(frozen=True)
class Plan:
    """What is decided over a whole batch before its images go through the towers; row i belongs to image i.

    The towers then treat each image by itself, so that a batch can go through them in parts, on one device after the
    other or on several at once, with the same result. What a method does not use is None.
    """

    kept: Tensor | None = None  # [C, n] the patches that stay
    shown: Tensor | None = None  # [C, n] bool, as in `Selection`
    crops: Tensor | None = None  # [C, V, 4] views of each image
    seams: Tensor | None = None  # [C, 2] row and column of patches at which a mosaic that begins with the image is cut

    def rows(self, rows: slice) -> Plan:
        """The plan of some of the images."""
        parts = (None if value is None else value[rows] for value in (self.kept, self.shown, self.crops, self.seams))
        return Plan(*parts)

    def select(self, context: PatchContext) -> Selection:
        """The patches that stay, as a `PatchSelector` gives them."""
        assert self.kept is not None
        return Selection(self.kept, self.shown)


class Objective(nn.Module):
    """A method of the paper's tables: a plan for the images of a batch, their way through the tower, and a loss.

    A run calls `attach` once, before the optimiser is made; for each step `progress`, `plan`, `further_texts`,
    `encode_images` and `loss`; and after the update `clamp` and `after_step`. `powerclip.train.towers.Towers` calls
    `plan`, `further_texts` and `encode_images`, compiled where a recipe asks for it.

    What is random or concerns the batch as a whole belongs into `plan` and `loss`: `encode_images` may see a batch in
    parts, and twice. Parameters of an objective are used by its `loss` alone: there the whole batch is at hand.
    """

    dense = True  # whether the loss uses patches and words: what it does not need is neither computed nor kept

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

    def noise_shape(self, encoder: DualEncoder) -> tuple[int, ...] | None:
        """The shape of the random numbers that the plan of one image needs; None when there is nothing to plan."""
        if not encoder.training or dropout_selector(encoder.clip.visual) is None:
            return None
        return (encoder.grid[0] * encoder.grid[1],)

    def plan(self, encoder: DualEncoder, images: Tensor, noise: Tensor, ranks: Ranks = SINGLE) -> Plan:
        """What is done with images [C, 3, H, W], given uniform numbers [C, *noise_shape]; without a gradient.

        `images` are all those of this rank; `ranks` gives access to the images of the others.
        """
        dropout = dropout_selector(encoder.clip.visual)
        return Plan() if dropout is None else Plan(kept=dropout.choose(noise))

    def text_noise_shape(self) -> tuple[int, ...] | None:
        """The shape of the random numbers that the further texts of one caption need; None when there are no such."""
        return None

    def further_texts(self, batch: Batch, noise: Tensor) -> FurtherTexts | None:
        """Texts that shall go through the text tower beside the captions, given numbers [C, *text_noise_shape].

        There are as many for each part of the batch that goes through the towers by itself.
        """
        return None

    def encode_images(self, encoder: DualEncoder, images: Tensor, plan: Plan) -> ImageFeatures:
        """Run the image tower on images [C, 3, H, W] as their plan says."""
        return encoder.image_features(images, None if plan.kept is None else plan.select, dense=self.dense)

    def loss(self, features: Features, batch: Batch, ranks: Ranks = SINGLE) -> Terms:
        """The loss of encoded features; each objective has its own.

        On several ranks, features and batch are this one's, and the mean over ranks is the loss of the whole batch.
        """
        raise TypeError(f"{type(self).__name__} defines no loss")

    def clamp(self) -> None:
        """Bring learned scales back into their range, after a step of the optimiser."""

    def after_step(self, encoder: DualEncoder) -> None:
        """Follow the towers, after a step of the optimiser."""


def learned_scale(start: float) -> nn.Parameter:
    """The logarithm of a learned factor on similarities, which starts at `start`."""
    return nn.Parameter(torch.tensor(math.log(start)))


@torch.no_grad()
def clamp_scale(log_scale: Tensor) -> None:
    """Keep a learned factor at 100 or below, as CLIP keeps its own."""
    log_scale.clamp_(max=MAX_LOG_SCALE)


def real_tokens(tokens: Tensor, ends: bool) -> Tensor:
    """Which tokens [C, L] take part in a token-wise loss: no padding; start and end of text only if `ends`.

    The end of text is the largest id of CLIP's vocabulary. It stays where a caption has nothing else.
    """
    end = tokens.argmax(dim=1, keepdim=True)
    position = torch.arange(tokens.shape[1], device=tokens.device)
    if ends:
        return position <= end
    return ((position > 0) & (position < end)) | ((position == end) & (end <= 1))
