"""A-CLIP: CLIP on the patches that a moving average of the image tower attends to, two views and self-supervision.

Yang et al., "Attentive Mask CLIP", ICCV 2023.

    L = ½ Σ_v L_CLIP(x_v, y) + L_SimCLR(z_1, z_2) + 2 · ½ Σ_v ‖ p̂_v − t̂ ‖²

v = 1, 2 are crops of an image. The teacher, an exponential moving average of the tower, sees the smallest crop that
covers both; a patch's score is the attention it gets from the teacher's class token, mean over heads and layers, moved
to each view. Scores are pooled 2 × 2 and the best half of the cells stays (25 of 49, 100 patches of 196). z, p and t
are heads on the class token: z for SimCLR (τ = 0.1), p a prediction (BYOL) of t, which is the teacher's.

Defaults: crops of 0.5 to 1 of the area; momentum 0.996 → 1 by a cosine; patch embedding frozen; heads of width 4,096.

A crop is x0, y0, x1, y1 in units of the image [C, 4], as `powerclip.data.crops` draws it.

Axes: C images · N patches · n patches that stay · P width of what a head gives · D width of what it reads
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
from powerclip.objectives.base import Objective, Plan, Terms
from powerclip.objectives.clip import clip_loss
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.settings import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveShare, Share, validate

if TYPE_CHECKING:
    from powerclip.data.batch import Batch
    from powerclip.encoders import DualEncoder


@dataclass(frozen=True)
class AClipSettings:
    """A-CLIP's views, masking and self-supervision."""

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
    teacher_pooled: Tensor  # [C, W] the teacher's class token, without a gradient


register_dataclass(TwoViews)


def simclr_loss(one: Tensor, other: Tensor, temperature: float, ranks: Ranks = SINGLE) -> Tensor:
    """SimCLR's NT-Xent: each view's positive is the other view, the 2C − 2 views of other images are negatives.

        L = mean over views a of −log [ exp(⟨ẑ_a, ẑ_a'⟩ / τ) / Σ_{b ≠ a} exp(⟨ẑ_a, ẑ_b⟩ / τ) ],   a' the other view of a

    Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020, Eq. 1.

    Args:
        one: [C, P] the first views; normalised here.
        other: [C, P] the second views.
        temperature: τ.
        ranks: the ranks that have the other images of the batch.

    Raises:
        ValueError: the views are not of one shape.

    Examples:
        >>> import torch
        >>> from powerclip.objectives.a_clip import simclr_loss
        >>> one, other = torch.eye(4), torch.eye(4)
        >>> simclr_loss(one, other, temperature=0.1)
        tensor(0.0003)
        >>> simclr_loss(one, other.roll(1, dims=0), temperature=0.1)  # each view's positive is another image
        tensor(10.0003)
    """
    if one.shape != other.shape:
        raise ValueError(f"views {list(one.shape)} and {list(other.shape)} are no pairs")
    one, other = (F.normalize(view.float(), dim=-1) for view in (one, other))
    views = torch.cat([ranks.gather(one), ranks.gather(other)])
    rows = torch.arange(len(one), device=one.device) + ranks.rows(len(one)).start
    self_index = torch.cat([rows, rows + len(views) // 2])
    logits = torch.cat([one, other]) @ views.T / temperature
    logits = logits.scatter(1, self_index.unsqueeze(-1), float("-inf"))
    return F.cross_entropy(logits, self_index.roll(len(one)))


def byol_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """BYOL's distance of unit vectors: ‖p̂ − t̂‖² = 2 − 2⟨p̂, t̂⟩, mean over views and images.

    Grill et al., "Bootstrap Your Own Latent", NeurIPS 2020, Eq. 2.

    Args:
        predicted: [C, 2, P] the student's prediction from each view.
        target: [C, P] what the teacher gives.

    Raises:
        ValueError: predictions and targets are not of the same images and width.

    Examples:
        >>> import torch
        >>> from powerclip.objectives.a_clip import byol_loss
        >>> target = torch.tensor([[0.0, 3.0]])
        >>> byol_loss(torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]), target)  # one view is right, one orthogonal
        tensor(1.)
    """
    if predicted[:, 0].shape != target.shape:
        raise ValueError(f"predictions {list(predicted.shape)} do not fit targets {list(target.shape)}")
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
        """Draw the crops of both views."""
        return Plan(crops=crop_boxes(noise.flatten(0, 1), self.settings.smallest).unflatten(0, (-1, 2)))

    def encode_images(self, encoder: DualEncoder, images: Tensor, plan: Plan) -> ImageFeatures:
        """Make both views, let the teacher choose their patches, and run both through the tower at once."""
        visual, settings = encoder.clip.visual, self.settings
        count = len(images)
        assert plan.crops is not None
        with torch.no_grad():
            crops = plan.crops.unbind(dim=1)
            covering = cover(*crops)
            teacher_pooled, scores = forward_attention(self.teacher, take_crops(images, covering))
            moved = torch.cat([resample_scores(scores, encoder.grid, covering, crop) for crop in crops])
            kept = select_attentive(moved, encoder.grid, settings.keep, settings.cell)
            views = torch.cat([take_crops(images, crop) for crop in crops])
        pooled, patches, _ = forward_image(visual, views, lambda context: kept, dense=self.dense)
        first, second = F.normalize(project(pooled, visual.proj), dim=-1).split(count)
        return ImageFeatures(
            image=first,
            patches=project(patches[:count], visual.proj),
            kept=kept[:count],
            extra=TwoViews(second, torch.stack(pooled.split(count), dim=1), teacher_pooled),
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
                target = _run_head(self.teacher_projection, views.teacher_pooled, ranks)
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
        # The teacher is not sharded, also where the tower is.
        student = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in student]
        torch._foreach_lerp_(teacher, student, 1 - self.momentum)


# ---- views -----------------------------------------------------------------------------------------------------------


def cover(one: Tensor, other: Tensor) -> Tensor:
    """The smallest crops [C, 4] that hold two others."""
    return torch.cat([torch.minimum(one[:, :2], other[:, :2]), torch.maximum(one[:, 2:], other[:, 2:])], dim=1)


def take_crops(images: Tensor, crops: Tensor) -> Tensor:
    """The crops [C, 4] of images [C, 3, H, W], resized to their size, bilinear."""
    x0, y0, x1, y1 = crops.unbind(dim=1)
    zero = torch.zeros_like(x0)
    # From −1 … 1 in the crop to −1 … 1 in the image.
    across = torch.stack([x1 - x0, zero, x0 + x1 - 1], dim=1)
    down = torch.stack([zero, y1 - y0, y0 + y1 - 1], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


# ---- patches that stay -----------------------------------------------------------------------------------------------


def resample_scores(scores: Tensor, grid: tuple[int, int], source: Tensor, target: Tensor) -> Tensor:
    """Scores [C, N] of the patches of one crop at the patches of another, bilinear.

    `source` [C, 4] is the crop that the scores belong to and `target` [C, 4] the other: x0, y0, x1, y1 in one frame.
    """
    rows, columns = grid
    size = source[:, 2:] - source[:, :2]
    start = (target[:, :2] - source[:, :2]) / size  # [C, 2], 0 to 1 in `source`
    end = (target[:, 2:] - source[:, :2]) / size
    x, y = ((torch.arange(n, device=scores.device, dtype=torch.float32) + 0.5) / n for n in (columns, rows))
    x = start[:, :1] + x * (end - start)[:, :1]
    y = start[:, 1:] + y * (end - start)[:, 1:]
    at = torch.stack([x.unsqueeze(1).expand(-1, rows, -1), y.unsqueeze(2).expand(-1, -1, columns)], dim=-1) * 2 - 1
    image = scores.float().unflatten(1, grid).unsqueeze(1)
    return F.grid_sample(image, at, mode="bilinear", padding_mode="border", align_corners=False).flatten(1)


def kept_cells(grid: tuple[int, int], keep: float, cell: int) -> int:
    """How many cells of `cell` × `cell` patches a share is, rounded up: half of 7 × 7 are 25."""
    return max(1, math.ceil((grid[0] // cell) * (grid[1] // cell) * keep - 1e-6))


def select_attentive(scores: Tensor, grid: tuple[int, int], keep: float = 0.5, cell: int = 2) -> Tensor:
    """Indices [C, n] of the patches of the best cells, for patch scores [C, N]; the grid divides into whole cells."""
    cells = F.avg_pool2d(scores.float().unflatten(1, grid).unsqueeze(1), cell).flatten(1)
    best = cells.topk(kept_cells(grid, keep, cell), dim=1).indices
    row, column = best // (grid[1] // cell) * cell, best % (grid[1] // cell) * cell
    corner = row * grid[1] + column  # [C, cells]
    step = torch.arange(cell, device=scores.device)
    inside = (step.unsqueeze(1) * grid[1] + step).flatten()
    return (corner.unsqueeze(-1) + inside).flatten(1).sort(dim=1).values


# ---- heads -----------------------------------------------------------------------------------------------------------


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


def batch_norm(module: nn.BatchNorm1d, values: Tensor, ranks: Ranks) -> Tensor:
    """What `module` would give for these rows [C, D] among those of all ranks, the same number on each.

    torch's own synchronised batch norm has no CPU version.
    """
    if ranks.is_single or not module.training:
        return module(values)  # type: ignore[no-any-return]
    with torch.autocast(values.device.type, enabled=False):
        rows = values.float()
        # The mean first, then the deviations from it: the difference of two large sums would lose digits.
        mean = ranks.mean(rows.mean(0))
        variance = ranks.mean((rows - mean).square().mean(0))
        _update_statistics(module, mean.detach(), variance.detach(), len(rows) * ranks.count)
        normal = (rows - mean) * (variance + module.eps).rsqrt()
        if module.affine:
            normal = normal * module.weight + module.bias
        return normal.to(values.dtype)


def _update_statistics(module: nn.BatchNorm1d, mean: Tensor, variance: Tensor, count: int) -> None:
    """Move the running statistics as the module does: by the variance without bias."""
    if module.running_mean is None or module.running_var is None or module.num_batches_tracked is None:
        return
    module.num_batches_tracked += 1
    momentum = 0.1 if module.momentum is None else module.momentum
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_((variance * count / (count - 1)).to(module.running_var.dtype), momentum)
