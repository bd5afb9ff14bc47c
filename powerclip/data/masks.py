"""Stored masks as regions of a crop: they follow the image through its crop onto the patch grid (§3.2).

`choose_regions` does it for a batch of shards, whose masks are bytes in sidecars; `CorpusMasks` for one of a corpus,
whose masks lie on the device as bits.

Axes: C images · K masks, of the image that has most · M regions · N patches · G cells of a mask's side
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from powerclip.data.corpus import Corpus
from powerclip.data.mask_codec import GRID, unpack_masks
from powerclip.data.sidecar import Miss, RegionSidecar, read_regions, sidecar_path

# Of a patch that belongs to a region at least this share is covered.
HALF = 0.5

NO_ROW = "images that no sidecar knows, with random boxes"
STALE = "images that changed since they were segmented, with random boxes"
NO_MASK = "images without a mask, with random boxes"
BROKEN = "images with masks that cannot be read, with random boxes"

# Masks of a corpus that are unpacked at once: 64 MiB as floats.
_AT_ONCE = 4096
# Images of shards whose masks are unpacked at once: 10 masks each are 5 MiB as floats, which a core's cache holds.
_IMAGES_AT_ONCE = 32


def crop_masks(masks: Tensor, crops: Tensor, grid: tuple[int, int]) -> Tensor:
    """Masks [C, K, G, G] as patches [C, K, N] of a crop of their image.

    A patch belongs to a mask that covers half of it; if there is none, the one that it covers most does. None only
    where nothing is covered.

    Args:
        masks: bool or numbers 0 and 1.
        crops: left, top, right, bottom as shares of the image [C, 4].
        grid: rows and columns of patches.
    """
    # In double precision: float32 knows an edge to the fifth digit of a patch, too few to tell a half by.
    left, top, right, bottom = crops.double().unbind(1)
    rows, columns = overlaps(top, bottom, grid[0]).float(), overlaps(left, right, grid[1]).float()
    across = masks.flatten(1, 2).float() @ columns.mT  # [C, K·G, columns]
    cover = (rows.unsqueeze(1) @ across.unflatten(1, masks.shape[1:3])).flatten(2)
    cover = cover.round(decimals=6)  # drops what is only rounding error
    return (cover >= cover.amax(-1, keepdim=True).clamp(max=HALF)) & (cover > 0)


def overlaps(start: Tensor, end: Tensor, cells: int) -> Tensor:
    """How much of each of a crop's `cells`, side by side from `start` to `end` [C], every cell of a mask takes.

    Rows of the result [C, cells, G] sum to 1: times a mask they are its mean over each of the crop's cells.
    """
    share = torch.arange(cells + 1, dtype=start.dtype, device=start.device) / cells
    edges = torch.lerp(start[:, None], end[:, None], share) * GRID
    # How far each edge reaches into each cell of the mask; what lies between two edges is the difference.
    reach = (edges.unsqueeze(-1) - torch.arange(GRID, device=start.device)).clamp(0, 1)
    return reach.diff(dim=1) * (cells / GRID / (end - start))[:, None, None]


# ---- images of shards ------------------------------------------------------------------------------------------------


def choose_regions(
    masks: Sequence[Sequence[bytes]], crops: Tensor, count: int, grid: tuple[int, int]
) -> list[Tensor | None]:
    """Up to `count` masks of each image as patches of its crop [regions, N]; None where a stored mask is none.

    A mask of which the crop shows nothing is left out, and the next one taken.

    Args:
        masks: as they are stored, those of each image in the order in which they are to be taken.
        crops: left, top, right, bottom as shares of the image [C, 4].
        count: M.
        grid: rows and columns of patches.
    """
    regions: list[Tensor | None] = [torch.zeros(0, grid[0] * grid[1], dtype=torch.bool)] * len(masks)
    left = [list(stored) for stored in masks]

    def wanted(image: int) -> int:
        selected = regions[image]
        return 0 if selected is None or not left[image] else count - len(selected)

    # Most images have as many as they need after one round.
    while unfinished := [image for image in range(len(masks)) if wanted(image)]:
        for group in (
            unfinished[start : start + _IMAGES_AT_ONCE] for start in range(0, len(unfinished), _IMAGES_AT_ONCE)
        ):
            bits = np.zeros((len(group), count, GRID, GRID), np.bool_)
            for row, image in zip(bits, group, strict=True):
                drawn, left[image] = left[image][: wanted(image)], left[image][wanted(image) :]
                try:
                    row[: len(drawn)] = unpack_masks(drawn)
                except ValueError:
                    regions[image] = None
            for image, patches in zip(group, crop_masks(torch.from_numpy(bits), crops[group], grid), strict=True):
                selected = regions[image]
                regions[image] = None if selected is None else torch.cat([selected, patches[patches.any(-1)]])
    return regions


# ---- a batch of a corpus ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusMasks:
    """The masks of all images of a corpus, end to end, and an empty one: it stands for those that an image lacks."""

    bits: Tensor  # [masks + 1, G, G/8] uint8, the highest bit to the left
    first: Tensor  # [images] number of the first mask of each image
    counts: Tensor  # [images] masks of each image
    most: int  # of any image
    fallbacks: dict[str, int] = field(default_factory=dict)  # images that have no masks by reason

    def summary(self) -> str:
        """`16,662 masks of 524 images (2 images without a mask, with random boxes)`."""
        replaced = ", ".join(f"{count:,} {reason}" for reason, count in self.fallbacks.items())
        images = len(self.counts) - sum(self.fallbacks.values())
        return f"{len(self.bits) - 1:,} masks of {images:,} images" + (f" ({replaced})" if replaced else "")

    def to(self, device: torch.device | str) -> CorpusMasks:
        """The same masks on another device."""
        return replace(self, bits=self.bits.to(device), first=self.first.to(device), counts=self.counts.to(device))

    def choose(self, images: Tensor, crops: Tensor, draws: Tensor, boxes: Tensor, grid: tuple[int, int]) -> Tensor:
        """Up to M masks of each image as patches of its crop, and boxes for those that are missing: [C, M, N].

        A mask of which the crop shows nothing is left out. All tensors lie on the device of the masks.

        Args:
            images: their numbers in the corpus [C].
            crops: left, top, right, bottom as shares of the image [C, 4].
            draws: random numbers in [0, 1) [C, K]; masks are taken in their order. K is at least what each of these
                images has.
            boxes: what stands for missing masks [C, M, N]. The first ones give way to masks.
            grid: rows and columns of patches.
        """
        group = max(1, _AT_ONCE // max(1, draws.shape[1]))
        parts = zip(*(values.split(group) for values in (images, crops, draws, boxes)), strict=True)
        return torch.cat([self._choose(grid, *part) for part in parts])

    def _choose(self, grid: tuple[int, int], images: Tensor, crops: Tensor, draws: Tensor, boxes: Tensor) -> Tensor:
        patches = crop_masks(self._unpack(images, draws.shape[1]), crops, grid)
        # Those that the crop does not show come last, so that a box takes their place.
        order = draws.where(patches.any(-1), 2).argsort(dim=1, stable=True)[:, : boxes.shape[1]]
        drawn = patches.gather(1, order.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
        replaced, kept = boxes.split([drawn.shape[1], boxes.shape[1] - drawn.shape[1]], 1)
        return torch.cat([drawn.where(drawn.any(-1, keepdim=True), replaced), kept], 1)

    def _unpack(self, images: Tensor, most: int) -> Tensor:
        """All masks of some images [C, K, G, G], empty ones after the last of each."""
        number = torch.arange(most, device=self.bits.device)
        first, counts = self.first[images, None], self.counts[images, None]
        packed = self.bits[(first + number).where(number < counts, len(self.bits) - 1)]
        shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=self.bits.device)
        return (packed.unsqueeze(-1) >> shifts & 1).flatten(-2)


def read_masks(corpus: Corpus, folder: Path | None = None) -> CorpusMasks:
    """The masks of a corpus from the sidecars of its shards, in `folder` or beside them.

    An image without masks, or with those of another image, is counted.

    Raises:
        SidecarError: a sidecar is torn, of another version, or none of regions.
    """
    packed = [np.zeros((0, GRID, GRID // 8), np.uint8)]
    counts: list[int] = []
    fallbacks: Counter[str] = Counter()
    images = zip(corpus.keys, corpus.origins, strict=True)
    for shard, members in groupby(images, key=lambda image: image[1].shard):
        path = sidecar_path(shard, "regions", folder)
        sidecar = read_regions(path) if path.exists() else None
        for key, origin in members:
            masks = NO_ROW if sidecar is None else _masks(sidecar, key, origin.image)
            if isinstance(masks, str):
                fallbacks[masks] += 1
                counts.append(0)
            else:
                packed.append(masks)
                counts.append(len(masks))
    packed.append(np.zeros((1, GRID, GRID // 8), np.uint8))
    lengths = torch.tensor(counts)
    return CorpusMasks(
        bits=torch.from_numpy(np.concatenate(packed)),
        first=lengths.cumsum(0) - lengths,
        counts=lengths,
        most=max(counts),
        fallbacks=dict(fallbacks),
    )


def _masks(sidecar: RegionSidecar, key: str, image: int) -> npt.NDArray[np.uint8] | str:
    """The masks of an image as bits [masks, G, G/8], or why it has none."""
    packed = sidecar.packed(key, image)
    if isinstance(packed, Miss):
        return NO_ROW if packed is Miss.NO_ROW else STALE
    try:
        return np.packbits(unpack_masks(packed), axis=-1) if packed else NO_MASK
    except ValueError:
        return BROKEN
