"""An open-vocabulary detector on an image tower: boxes by torchvision's parts, names by text embeddings.

    patches ──► pyramid ──► proposals ──► boxes and their class probabilities z (learned on base classes)
       └──────► projected into the joint space ──► the mean under a box ──► probabilities w of the tower itself

    score of class c = z_c^(1-e) · w_c^e, with one exponent e for base and another for novel classes

The tower needs no box to know a class that it has read of; what was learned on base classes finds the boxes.
Kuo et al., "F-VLM: Open-Vocabulary Object Detection upon Frozen Vision and Language Models", ICLR 2023.

Axes: B images · R boxes of one image · K classes · D width of the joint space
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import batched_nms, clip_boxes_to_image, remove_small_boxes, roi_align

from powerclip.detect.data import in_shares
from powerclip.detect.heads import OpenHeads
from powerclip.detect.pyramid import SimplePyramid
from powerclip.encoders import DualEncoder
from powerclip.encoders.vision import patch_size
from powerclip.errors import UserError

SHAPES = (0.5, 1.0, 2.0)  # height over width of the anchors
ANCHORS = (4.0, 4.0 * 2**0.5)  # their sides, in strides of their level
PROPOSALS = 300  # of an image that are looked at
MOST = 100  # boxes of an image that are kept, as COCO counts them
_CONSIDERED = 1000  # pairs of box and class that enter non-maximum suppression
_FLOOR = 1e-4  # lowest score of a box
_OVERLAP = 0.5  # IoU from which the weaker of two boxes of a class goes


@dataclass(frozen=True)
class HeadConfig:
    """The learned part of a detector."""

    size: int  # pixels of an image's longer side
    width: int = 256  # channels of the pyramid
    hidden: int = 1024  # of the two layers behind a pooled box


@dataclass(frozen=True)
class ScoredBoxes:
    """What a detector makes of one image, before classes compete: boxes in shares, and two opinions on each."""

    boxes: Tensor  # [R, 4]
    learned: Tensor  # [R, K] z
    tower: Tensor  # [R, K] w

    def score(self, exponents: Tensor) -> Tensor:
        """z^(1-e) · w^e [R, K] for exponents e [K]: the geometric mean of both, weighted."""
        tiny = torch.finfo(torch.float32).tiny
        return (
            (1 - exponents) * self.learned.clamp(min=tiny).log() + exponents * self.tower.clamp(min=tiny).log()
        ).exp()


@dataclass(frozen=True)
class Detections:
    """The boxes of one image in shares, the surest first."""

    boxes: Tensor  # [n, 4]
    labels: Tensor  # [n]
    scores: Tensor  # [n]

    def take(self, rows: Tensor) -> Detections:
        """Some of them."""
        return Detections(self.boxes[rows], self.labels[rows], self.scores[rows])


class Detector(nn.Module):
    """The learned part of a detector, around an image tower that is no part of its weights.

    Args:
        encoder: the towers; both stay as they are unless someone trains them.
        config: the sizes of the learned part.
        bf16: whether the tower computes in bf16. What is learned is float32: bf16 has no pixels beyond 256.
    """

    def __init__(self, encoder: DualEncoder, config: HeadConfig, *, bf16: bool = False):
        super().__init__()
        visual = encoder.clip.visual
        rows, columns = patch_size(visual)
        if rows != columns:
            raise UserError(f"the image tower's patches are {rows}×{columns} pixels: detection needs square ones")
        self._encoder = (encoder,)  # in a tuple: nn.Module would make it a part
        self.config, self.patch, self.bf16 = config, rows, bf16
        self.tuned = False
        with torch.no_grad():
            probe = torch.zeros(1, 3, *encoder.image_size, device=next(encoder.parameters()).device)
            channels = encoder.encode_maps(probe)[1].shape[1]
        self.pyramid = SimplePyramid(channels, config.width, rows)
        strides = self.pyramid.strides
        self.multiple = max(strides[-1], rows)  # pixels: sides of a batch are whole cells of every level
        settings = visual.preprocess_cfg
        self.transform = GeneralizedRCNNTransform(
            config.size, config.size, settings["mean"], settings["std"], size_divisible=self.multiple
        )
        anchors = AnchorGenerator(
            tuple(tuple(round(side * stride) for side in ANCHORS) for stride in strides), (SHAPES,) * len(strides)
        )
        self.proposals = RegionProposalNetwork(
            anchors,
            RPNHead(config.width, len(ANCHORS) * len(SHAPES), conv_depth=2),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 1000, "testing": 1000},
            post_nms_top_n={"training": 2 * PROPOSALS, "testing": PROPOSALS},
            nms_thresh=0.7,
        )
        self.heads = OpenHeads(config.width, config.hidden, encoder.embed_dim, strides)
        self.to(probe.device)

    @property
    def encoder(self) -> DualEncoder:
        """The towers."""
        return self._encoder[0]

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return next(self.parameters()).device

    def losses(
        self, images: Sequence[Tensor], boxes: Sequence[Tensor], labels: Sequence[Tensor], classes: Tensor
    ) -> dict[str, Tensor]:
        """The four losses of a batch: whether an anchor is an object, where it is, its name, where exactly.

        Args:
            images: bytes [3, H, W], of any sizes.
            boxes: of each image [n, 4], in pixels.
            labels: their classes [n], from 0.
            classes: normalised text embeddings [K, D].
        """
        targets = [{"boxes": b, "labels": k + 1} for b, k in zip(boxes, labels, strict=True)]
        listed, targets = self._prepare(images, targets)
        maps = self.pyramid(self.see(listed)[0])
        proposals, found = self.proposals(listed, maps, targets)
        naming, moving = self.heads.losses(maps, proposals, listed.image_sizes, targets, classes)
        return {
            "objectness": found["loss_objectness"],
            "proposals": found["loss_rpn_box_reg"],
            "naming": naming,
            "boxes": moving,
        }

    @torch.no_grad()
    def find(self, images: Sequence[Tensor], classes: Tensor) -> list[ScoredBoxes]:
        """The boxes of images, bytes [3, H, W], and how well each fits the classes [K, D]."""
        listed, _ = self._prepare(images)
        patches, dense = self.see(listed)
        maps = self.pyramid(patches)
        proposals, _ = self.proposals(listed, maps)
        learned, moved = self.heads.describe(maps, proposals, listed.image_sizes, classes)
        counts = [len(one) for one in proposals]
        boxes = [clip_boxes_to_image(b, s) for b, s in zip(moved.split(counts), listed.image_sizes, strict=True)]
        tower = self.name(dense, boxes, classes)
        return [
            ScoredBoxes(in_shares(b, size), z, w)
            for b, size, z, w in zip(boxes, listed.image_sizes, learned.split(counts), tower.split(counts), strict=True)
        ]

    @torch.no_grad()
    def name_boxes(self, images: Sequence[Tensor], boxes: Sequence[Tensor], classes: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities [R, K] of given boxes, in pixels of their images: those that are learned, and the tower's."""
        listed, targets = self._prepare(images, [{"boxes": one} for one in boxes])
        patches, dense = self.see(listed)
        given = [target["boxes"] for target in targets]
        learned, _ = self.heads.describe(self.pyramid(patches), given, listed.image_sizes, classes)
        return learned, self.name(dense, given, classes)

    def name(self, dense: Tensor, boxes: Sequence[Tensor], classes: Tensor) -> Tensor:
        """The tower's own probabilities w [R, K] of boxes in pixels: softmax of its scaled cosines."""
        scale = self.encoder.clip.logit_scale.exp().detach().float().reshape(())
        return (scale * region_embeddings(dense, boxes, self.patch) @ classes.T).softmax(-1)

    def see(self, images: ImageList) -> tuple[Tensor, Tensor]:
        """The tower's patches [B, width, rows, columns], and the same in the joint space; zero beyond an image."""
        with nullcontext() if self.tuned and torch.is_grad_enabled() else torch.no_grad():
            return tower_maps(self.encoder, images, self.patch, bf16=self.bf16)

    def _prepare(
        self, images: Sequence[Tensor], targets: list[dict[str, Tensor]] | None = None
    ) -> tuple[ImageList, list[dict[str, Tensor]]]:
        """Images at their size, normalised, in one batch, and their boxes at that size."""
        pixels = [image.to(self.device, non_blocking=True).float().div_(255) for image in images]
        moved = [{k: v.to(self.device, non_blocking=True) for k, v in one.items()} for one in targets or ()]
        listed, resized = self.transform(pixels, moved if targets is not None else None)
        return listed, resized or []


def tower_maps(encoder: DualEncoder, images: ImageList, patch: int, *, bf16: bool = False) -> tuple[Tensor, Tensor]:
    """The patches of each image at its own aspect, as maps that are zero beyond it.

    Images of one grid pass the tower together: no padding takes part in attention, and what an image becomes does not
    depend on the others of its batch.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for number, (height, width) in enumerate(images.image_sizes):
        groups.setdefault((-(-height // patch), -(-width // patch)), []).append(number)
    rows, columns = (side // patch for side in images.tensors.shape[-2:])
    maps: list[Tensor] = []
    cast: AbstractContextManager[object] = torch.autocast(images.tensors.device.type, torch.bfloat16, enabled=bf16)
    for (height, width), members in groups.items():
        part = images.tensors[members, :, : height * patch, : width * patch]
        with cast:
            seen = encoder.encode_maps(part)[1:]
        if not maps:
            maps = [
                one.new_zeros(len(images.image_sizes), one.shape[1], rows, columns, dtype=torch.float32) for one in seen
            ]
        for whole, one in zip(maps, seen, strict=True):
            whole[members, :, :height, :width] = one.float()
    return maps[0], maps[1]


def region_embeddings(dense: Tensor, boxes: Sequence[Tensor], patch: int) -> Tensor:
    """Normalised means [R, D] of dense features [B, D, rows, columns] under boxes, in pixels of each image."""
    pooled = roi_align(dense, list(boxes), output_size=1, spatial_scale=1 / patch, aligned=True)
    return F.normalize(pooled.flatten(1), dim=-1)


def detections(found: ScoredBoxes, exponents: Tensor, most: int = MOST) -> Detections:
    """The boxes of an image after the classes' own non-maximum suppression, at most so many."""
    scores = found.score(exponents)
    values, order = scores.flatten().topk(min(_CONSIDERED, scores.numel()))
    order = order[values > _FLOOR]
    rows, labels = order // scores.shape[1], order % scores.shape[1]
    all_found = Detections(found.boxes[rows], labels, scores[rows, labels])
    all_found = all_found.take(remove_small_boxes(all_found.boxes, 1e-4))
    return all_found.take(batched_nms(all_found.boxes, all_found.scores, all_found.labels, _OVERLAP)[:most])


def on_cpu(found: ScoredBoxes) -> ScoredBoxes:
    """The same in host memory."""
    return replace(found, boxes=found.boxes.cpu(), learned=found.learned.cpu(), tower=found.tower.cpu())
