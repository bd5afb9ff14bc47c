"""What is said of a proposed box: which class, by its text embedding, and how the box should move, whatever the class.

Sampling, matching and coding of boxes are torchvision's `RoIHeads`.

Axes: R boxes of all images · K classes · D width of the joint space
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

BINS = 7  # rows and columns that a box is pooled to
SAMPLED, POSITIVE = 128, 0.25  # boxes of an image that are learned from, and the share of objects among them
MATCH = 0.5  # IoU from which a proposal is an object's
START_SCALE, MAX_SCALE = 20.0, 100.0  # of cosines, as logits


class OpenPredictor(nn.Module):
    """Logits of the background and of classes that only their text embeddings name, and one change of the box."""

    def __init__(self, hidden: int, embed_dim: int):
        super().__init__()
        self.embed = nn.Linear(hidden, embed_dim)
        self.background = nn.Parameter(F.normalize(torch.randn(embed_dim), dim=0))
        self.log_scale = nn.Parameter(torch.tensor(math.log(START_SCALE)))
        self.box = nn.Linear(hidden, 4)
        nn.init.normal_(self.box.weight, std=0.001)
        nn.init.zeros_(self.box.bias)

    def forward(self, features: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, 1+K], the background first, and deltas [R, 4] of boxes with features [R, hidden].

        `classes` are the normalised text embeddings [K, D].
        """
        directions = torch.cat([F.normalize(self.background, dim=0)[None], classes])
        cosines = F.normalize(self.embed(features), dim=-1) @ directions.T
        return self.log_scale.exp().clamp(max=MAX_SCALE) * cosines, self.box(features)


class OpenHeads(RoIHeads):
    """torchvision's heads with classes that are given with each call, and boxes that do not depend on them."""

    def __init__(self, width: int, hidden: int, embed_dim: int, strides: tuple[int, ...]):
        pool = MultiScaleRoIAlign([str(number) for number in range(len(strides))], BINS, sampling_ratio=2)
        # It would infer both from the first batch, and assumes strides that are powers of two. A box goes to the level
        # where it has about twice as many cells as bins, as in FPN (224 pixels at stride 16).
        pool.scales = [1 / stride for stride in strides]
        pool.map_levels = LevelMapper(
            0, len(strides) - 1, canonical_scale=2 * BINS * strides[-2], canonical_level=len(strides) - 2
        )
        head = TwoMLPHead(width * BINS**2, hidden)
        super().__init__(
            box_roi_pool=pool,
            box_head=head,
            box_predictor=OpenPredictor(hidden, embed_dim),
            fg_iou_thresh=MATCH,
            bg_iou_thresh=MATCH,
            batch_size_per_image=SAMPLED,
            positive_fraction=POSITIVE,
            bbox_reg_weights=None,
            score_thresh=0.0,
            nms_thresh=0.5,
            detections_per_img=100,
        )

    def losses(
        self,
        maps: dict[str, Tensor],
        proposals: list[Tensor],
        sizes: list[tuple[int, int]],
        targets: list[dict[str, Tensor]],
        classes: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The losses of naming and of moving boxes; `labels` of the targets begin with 1, as 0 is the background."""
        sampled, _, labels, wanted = self.select_training_samples(proposals, targets)
        logits, deltas = self._predict(maps, sampled, sizes, classes)
        # torchvision's loss takes the deltas of the right class: here all classes share one.
        shared = deltas.unsqueeze(1).expand(-1, logits.shape[1], -1).flatten(1)
        naming, moving = fastrcnn_loss(logits, shared, labels, wanted)
        return naming, moving

    def describe(
        self, maps: dict[str, Tensor], proposals: list[Tensor], sizes: list[tuple[int, int]], classes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Probabilities [R, K], what is left being the background's, and the moved boxes [R, 4]."""
        logits, deltas = self._predict(maps, proposals, sizes, classes)
        return logits.softmax(-1)[:, 1:], self.box_coder.decode(deltas, proposals)[:, 0]

    def _predict(
        self, maps: dict[str, Tensor], boxes: list[Tensor], sizes: list[tuple[int, int]], classes: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.box_predictor(self.box_head(self.box_roi_pool(maps, boxes, sizes)), classes)
