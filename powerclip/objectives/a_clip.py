"""A-CLIP: CLIP on the patches that a slowly moving copy of the image tower looks at, two views and self-supervision.

Yang et al., "Attentive Mask CLIP", ICCV 2023.

    L = ½ Σ_v L_CLIP(x_v, y) + L_SimCLR(z_1, z_2) + 2 · ½ Σ_v ‖ p̂_v − t̂ ‖²

v = 1, 2 are crops of an image. The teacher, an exponential moving average of the tower, sees the smallest crop that
covers both; a patch's score is the attention it gets from the teacher's class token, mean over heads and layers, moved
to each view. Scores are pooled 2 × 2 and the best half of the cells stays (25 of 49, 100 patches of 196). z, p and t
are heads on the class token: z for SimCLR (τ = 0.1), p a prediction (BYOL) of t, which is the teacher's.

Defaults: crops of 0.5 to 1 of the area; momentum 0.996 → 1 by a cosine; patch embedding frozen; heads of width 4,096.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from powerclip.data.crops import crop_boxes
from powerclip.encoders.attention import check_class_attention, forward_attention
from powerclip.encoders.dual import project
from powerclip.encoders.features import Features, ImageFeatures
from powerclip.encoders.vision import forward_image
from powerclip.errors import UserError
from powerclip.objectives.attentive import resample_scores, select_attentive
from powerclip.objectives.base import Objective, Plan, Terms
from powerclip.objectives.batch_norm import batch_norm
from powerclip.objectives.clip import clip_loss
from powerclip.objectives.views import cover, take_crops
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.settings import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveShare, Share, validate

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import DualEncoder


@dataclass(frozen=True)
class AClipSettings:
    """How A-CLIP looks, masks and supervises itself."""

    keep: PositiveShare = 0.5  # share of the cells that stay
    cell: PositiveInt = 2  # patches on a side of a cell
    smallest: PositiveShare = 0.5  # area of a view, as a share of the image: from this to 1
    momentum: Share = 0.996  # of the teacher's moving average at the start; 1 at the end
    simclr_weight: NonNegativeFloat = 1.0  # weight of SimCLR's loss between the views
    temperature: PositiveFloat = 0.1  # τ of SimCLR's loss
    byol_weight: NonNegativeFloat = 2.0  # weight of BYOL's loss between student and teacher
    hidden: PositiveInt = 4096  # width of the heads
    output: PositiveInt = 256  # width of what the heads give
    freeze_patches: bool = True  # whether the patch embedding stays as it was initialised

    def __post_init__(self) -> None:
        validate(self, "objective_settings")


@dataclass(frozen=True)
class TwoViews:
    """What A-CLIP's loss needs beside the features of the first view. W: the tower's own width."""

    second: Tensor  # [C, D] the second view's embedding, normalised
    pooled: Tensor  # [C, 2, W] both views' class tokens, for the heads
    seen: Tensor  # [C, W] the teacher's, without a gradient


register_dataclass(TwoViews)


def simclr_loss(one: Tensor, other: Tensor, temperature: float, ranks: Ranks = SINGLE) -> Tensor:
    """NT-Xent of C pairs of views [C, P]: each view's positive is the other, all 2C − 2 others are negatives."""
    one, other = (F.normalize(view.float(), dim=-1) for view in (one, other))
    views = torch.cat([ranks.gather(one), ranks.gather(other)])
    own = torch.arange(len(one), device=one.device) + ranks.rows(len(one)).start
    itself = torch.cat([own, own + len(views) // 2])
    logits = torch.cat([one, other]) @ views.T / temperature
    logits = logits.scatter(1, itself.unsqueeze(-1), float("-inf"))
    return F.cross_entropy(logits, itself.roll(len(one)))


def byol_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """‖p̂ − t̂‖² = 2 − 2⟨p̂, t̂⟩, mean over predictions [C, 2, P] of targets [C, P]."""
    return (2 - 2 * F.cosine_similarity(predicted.float(), target.float().unsqueeze(1), dim=-1)).mean()


class AClip(Objective):
    """CLIP's loss of two attentively masked views, and both self-supervised losses."""

    dense = False

    def __init__(self, settings: AClipSettings | None = None) -> None:
        super().__init__()
        self.settings = settings or AClipSettings()
        self._step, self._steps = 0, 1

    def attach(self, encoder: DualEncoder) -> None:
        """Copy the image tower as the teacher, make the heads, and freeze what A-CLIP freezes."""
        visual, settings = encoder.clip.visual, self.settings
        check_class_attention(visual)
        if any(side % settings.cell for side in encoder.grid):
            rows, columns = encoder.grid
            raise UserError(
                f"a_clip pools attention over cells of {settings.cell} × {settings.cell} patches, and the image tower "
                f"has {rows} × {columns}: set objective_settings.cell to a number that divides both (1 always does)"
            )
        if settings.freeze_patches:
            visual.conv1.requires_grad_(False)
        width, hidden, output = visual.ln_post.normalized_shape[0], settings.hidden, settings.output
        self.contrast = _head(width, hidden, output, layers=3)
        self.projection = _head(width, hidden, output)
        self.prediction = _head(output, hidden, output)
        # nn.Module's attributes are typed Tensor | Module; open_clip's tower carries more than that.
        self.teacher: Any = copy.deepcopy(visual).requires_grad_(False)
        self.teacher_projection = copy.deepcopy(self.projection).requires_grad_(False)

    def progress(self, step: int, steps: int) -> None:
        """Note the step, for the teacher's momentum."""
        super().progress(step, steps)
        self._step, self._steps = step, steps

    def noise_shape(self, encoder: DualEncoder) -> tuple[int, ...] | None:
        """Four numbers for each view."""
        return 2, 4

    def plan(self, encoder: DualEncoder, images: Tensor, noise: Tensor, ranks: Ranks = SINGLE) -> Plan:
        """Where the views lie."""
        return Plan(crops=crop_boxes(noise.flatten(0, 1), self.settings.smallest).unflatten(0, (-1, 2)))

    def encode_images(self, encoder: DualEncoder, images: Tensor, plan: Plan) -> ImageFeatures:
        """Make both views, let the teacher choose their patches, and run both through the tower at once."""
        visual, settings = encoder.clip.visual, self.settings
        count = len(images)
        assert plan.crops is not None
        with torch.no_grad():
            one, other = plan.crops.unbind(dim=1)
            both = cover(one, other)
            seen, scores = forward_attention(self.teacher, take_crops(images, both))
            moved = torch.cat([resample_scores(scores, encoder.grid, both, view) for view in (one, other)])
            kept = select_attentive(moved, encoder.grid, settings.keep, settings.cell)
            views = torch.cat([take_crops(images, view) for view in (one, other)])
        pooled, patches, _ = forward_image(visual, views, lambda context: kept, dense=self.dense)
        first, second = F.normalize(project(pooled, visual.proj), dim=-1).split(count)
        return ImageFeatures(
            image=first,
            patches=project(patches[:count], visual.proj),
            kept=kept[:count],
            extra=TwoViews(second, torch.stack(pooled.split(count), dim=1), seen),
        )

    def loss(self, features: Features, batch: Batch, ranks: Ranks = SINGLE) -> Terms:
        """CLIP's loss of both views, SimCLR's between them and BYOL's against the teacher."""
        views = features.extra
        if not isinstance(views, TwoViews):
            raise TypeError("a_clip's loss needs the features of its own encode_images")
        text, scale = features.text, features.logit_scale
        clip = (clip_loss(features.image, text, scale, ranks) + clip_loss(views.second, text, scale, ranks)) / 2
        bf16 = features.patches.dtype == torch.bfloat16
        contrasted, predicted, target = self.run_heads(views, ranks, bf16=bf16)
        contrast = simclr_loss(contrasted[:, 0], contrasted[:, 1], self.settings.temperature, ranks)
        distance = byol_loss(predicted, target)
        total = clip + self.settings.simclr_weight * contrast + self.settings.byol_weight * distance
        return Terms(total, {"clip": clip.detach(), "simclr": contrast.detach(), "byol": distance.detach()})

    def run_heads(self, views: TwoViews, ranks: Ranks = SINGLE, *, bf16: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """z and p [C, 2, P] of both views and t [C, P]. P: what the heads give.

        They normalise over the batch, so they are no part of `encode_images`, which may see parts of it.
        """
        pooled = views.pooled.flatten(0, 1)
        with torch.autocast(pooled.device.type, torch.bfloat16, enabled=bf16):
            contrasted = _run_head(self.contrast, pooled, ranks)
            predicted = _run_head(self.prediction, _run_head(self.projection, pooled, ranks), ranks)
            with torch.no_grad():
                target = _run_head(self.teacher_projection, views.seen, ranks)
        return contrasted.unflatten(0, (-1, 2)), predicted.unflatten(0, (-1, 2)), target

    @property
    def momentum(self) -> float:
        """How much of the teacher stays at this step: from the setting to 1 along a cosine."""
        return 1 - (1 - self.settings.momentum) * (1 + math.cos(math.pi * self._step / self._steps)) / 2

    @torch.no_grad()
    def after_step(self, encoder: DualEncoder) -> None:
        """Move the teacher towards the tower."""
        teacher = [*self.teacher.parameters(), *self.teacher_projection.parameters()]
        student: list[Any] = [*encoder.clip.visual.parameters(), *self.projection.parameters()]
        # The teacher is whole on every rank, also where the tower is sharded.
        student = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in student]
        torch._foreach_lerp_(teacher, student, 1 - self.momentum)


def _head(width: int, hidden: int, output: int, layers: int = 2) -> nn.Sequential:
    """A perceptron with batch norm between its layers: SimCLR's has three, BYOL's have two without biases."""
    plain = layers == 2
    modules: list[nn.Module] = []
    for _ in range(layers - 1):
        modules += [nn.Linear(width, hidden, bias=not plain), nn.BatchNorm1d(hidden), nn.ReLU()]
        width = hidden
    return nn.Sequential(*modules, nn.Linear(width, output, bias=not plain))


def _run_head(head: nn.Module, values: Tensor, ranks: Ranks) -> Tensor:
    for module in head.children():
        values = batch_norm(module, values, ranks) if isinstance(module, nn.BatchNorm1d) else module(values)
    return values
