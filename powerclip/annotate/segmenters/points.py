"""Everything in an image from a model that segments what lies under a point: a grid of points, filters, no doubles.

As SAM's automatic mask generator does it, except that masks are never enlarged to the image's size, and are compared
where they will be stored, on the sidecars' grid, instead of by their boxes. The image encoder runs once for a batch of
images, the decoder on batches of points.

Axes: B images · P points · K masks of each point · h, w rows and columns of the decoder's masks · n points left
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.annotate.segmenters.base import Masks, SegmenterImage, no_masks
from powerclip.annotate.segmenters.overlap import distinct
from powerclip.data.mask_codec import GRID
from powerclip.errors import UserError

_OUTSIDE = -1e4  # logit of what lies outside the image


@dataclass(frozen=True)
class PointOptions:
    """What decides which masks are kept."""

    points: int = 16  # on a side of the grid: 16² prompts, three masks each
    quality: float = 0.88  # the least IoU that the model expects of its own mask
    stability: float = 0.95  # the least IoU of the mask drawn a bit tighter and a bit wider
    smallest: float = 0.002  # of the image's area
    largest: float = 0.9
    overlap: float = 0.7  # IoU from which on the lesser of two masks is the same one again
    most: int = 32  # masks of one image, the best

    def __post_init__(self) -> None:
        for name, low, high in (("points", 1, 128), ("most", 1, 1000)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"segmenter option {name}: {getattr(self, name)} is not between {low} and {high}")
        for name in ("quality", "stability", "smallest", "largest", "overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"segmenter option {name}: {getattr(self, name)} is not between 0 and 1")


@dataclass(frozen=True)
class Drawn:
    """What a decoder drew for n points."""

    owner: Tensor  # [n] the image of each
    logits: Tensor  # [n, K, h, w]
    quality: Tensor  # [n, K] the IoU that the model expects of each mask


class PointSegmenter(ABC):
    """A segmenter around a model that takes points. Subclasses say how it encodes and decodes."""

    name: str
    version: str

    def __init__(self, settings: PointOptions, identity: dict[str, Any], device: torch.device, at_once: int):
        self.settings, self.device = settings, device
        self.options = {**asdict(settings), **identity}
        self._at_once = at_once  # points that the decoder sees together: bounds the memory, changes no mask

    @abstractmethod
    def encode(self, images: Sequence[SegmenterImage]) -> tuple[Any, Tensor]:
        """What the decoder needs of these images, and how much of the model's square each fills [B, (x, y)]."""

    @abstractmethod
    def decode(self, encoded: Any, points: Tensor) -> Drawn:
        """The masks of points [B, P, (x, y)] from 0 to 1 of the square; points without a good mask may be left out."""

    def segment(self, images: Sequence[SegmenterImage]) -> list[Masks]:
        """The masks of each image, those first of which the model expects most."""
        return self.submit(images)()

    @torch.inference_mode()
    def submit(self, images: Sequence[SegmenterImage]) -> Callable[[], list[Masks]]:
        """Start to segment images; what is returned waits for their masks."""
        if not images:
            return list
        encoded, extent = self.encode(images)
        selected: list[list[tuple[Tensor, Tensor]]] = [[] for _ in images]
        step = max(1, self._at_once // len(images))
        for points in point_grid(self.settings.points).to(self.device).split(step):
            for at, masks, quality in self._select(self.decode(encoded, points * extent[:, None]), extent):
                selected[at].append((masks, quality))
        results = [self._distinct(parts) for parts in selected]
        return lambda: results

    def _select(self, drawn: Drawn, extent: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Of one batch of points: each image's number, its good masks on the grid, and their expected IoU."""
        logits = drawn.logits.float()
        rows, columns = extent_cells(extent, logits.shape[-2:])
        down, across = (torch.arange(size, device=logits.device) for size in logits.shape[-2:])
        inside = (down[:, None] < rows[:, None, None]) & (across < columns[:, None, None])  # [B, h, w]
        logits = logits.masked_fill(~inside[drawn.owner, None], _OUTSIDE)
        area = (logits > 0).sum((-2, -1)) / (rows * columns)[drawn.owner, None]
        good = (drawn.quality >= self.settings.quality) & (stability(logits) >= self.settings.stability)
        good &= (area >= self.settings.smallest) & (area <= self.settings.largest)  # [n, K]
        owner = drawn.owner[:, None].expand_as(good)[good]
        masks, quality = logits[good] > 0, drawn.quality[good].float()
        for at, (height, width) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            in_image = owner == at
            if in_image.any():
                yield at, to_grid(masks[in_image][:, :height, :width]), quality[in_image]

    def _distinct(self, selected: list[tuple[Tensor, Tensor]]) -> Masks:
        """The masks of one image without near-duplicates of better ones."""
        if not selected:
            return no_masks()
        masks, quality = (torch.cat(parts) for parts in zip(*selected, strict=True))
        best_first = masks[quality.argsort(descending=True, stable=True)]
        return distinct(best_first, self.settings.overlap, self.settings.most).cpu().numpy()


def point_grid(side: int) -> Tensor:
    """The middles of side² equal boxes [side², (x, y)], from 0 to 1."""
    steps = (torch.arange(side) + 0.5) / side
    return torch.cartesian_prod(steps, steps).flip(-1)


def extent_cells(extent: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rows and columns [B] of the decoder's masks that lie in each image."""
    rows = (extent[:, 1] * size[0]).round().long().clamp(min=1)
    return rows, (extent[:, 0] * size[1]).round().long().clamp(min=1)


def stability(logits: Tensor, offset: float = 1.0) -> Tensor:
    """IoU of the masks [...] that two thresholds draw, `offset` above and below zero: high for a crisp edge."""
    tight = (logits > offset).sum((-2, -1))
    wide = (logits > -offset).sum((-2, -1))
    return tight / wide.clamp(min=1)


def to_grid(masks: Tensor) -> Tensor:
    """Masks [n, h, w] on the sidecars' grid: cells half covered; of a mask too thin for that, the most covered ones."""
    cover = F.adaptive_avg_pool2d(masks.float().unsqueeze(1), GRID).squeeze(1)
    return cover >= cover.amax((-2, -1), keepdim=True).clamp(max=0.5, min=1e-6)


def to_square(image: SegmenterImage, size: tuple[int, int], device: torch.device) -> Tensor:
    """An image's pixels [3, *size], 0 … 255, resized on the device."""
    # A copy: arrays that come from PIL cannot be written to, which torch warns about.
    pixels = torch.from_numpy(np.array(image.pixels)).to(device).permute(2, 0, 1).float()
    return F.interpolate(pixels[None], size, mode="bilinear", antialias=True, align_corners=False)[0].clamp_(0, 255)
