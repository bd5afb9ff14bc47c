"""What one training step sees: images, captions, and the parts of both that are to be aligned; and how it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from powerclip.alignment.phrases import Phrases
from powerclip.alignment.regions import DrawnRegions
from powerclip.data.pixels import CLIP_MEAN, CLIP_STD
from powerclip.data.tokens import Nodes


@dataclass(frozen=True)
class BatchSpec:
    """How batches are made, whatever they are made from."""

    image_size: tuple[int, int]  # height and width in pixels
    grid: tuple[int, int]  # rows and columns of patches
    batch_size: int  # C, of all ranks together
    regions: int = 10  # M, of each image
    drawn: DrawnRegions = "random"  # how regions that are no masks are drawn
    largest_box: float = 1.0  # longest side of a random box, as a share of the image's
    nodes: Nodes = "phrases"  # which constituents of the trees take part
    crop: float = 0.9  # smallest share of an image's area that a crop keeps; scenes are shown whole
    seed: int = 0  # which samples, in which order
    augment_seed: int = 0  # which captions, crops, boxes and masks of them
    mean: tuple[float, ...] = CLIP_MEAN  # what the image tower wants its pixels normalised with
    std: tuple[float, ...] = CLIP_STD
    length_multiple: int = 1  # token rows are padded to a multiple of it: few different shapes to compile for
    sort_by_length: bool = False  # order the pairs of a batch by their captions' lengths: short ones need less padding
    workers: int = 0  # threads or processes that make batches ahead; 0 makes each when it is needed
    # Where batches are wanted.
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class FurtherTexts:
    """Texts that an objective makes of the captions of a batch, and that go through the text tower beside them."""

    tokens: Tensor  # [E, L] long
    phrases: Phrases  # the leaves of each text; there are no nodes
    tile: Tensor  # [E, K] the tile of this rank's mosaics that each leaf belongs to
    asked: Tensor  # [E, K] bool: the leaves that shall find their tile
    alone: Tensor  # [E] bool: the texts that are one leaf, and shall find their tile as a whole too


@dataclass
class Batch:
    """C pairs of an image and a caption, with M regions of each image and the tree of each caption."""

    # [C, 3, H, W] float, normalised for the image tower; under train.precompute [C, 1+N, D], tokens of frozen blocks
    images: Tensor
    tokens: Tensor  # [C, L] long
    regions: Tensor  # [C, M, N] bool
    phrases: Phrases
    keys: list[str]
    counts: Mapping[str, int] = field(default_factory=dict)  # what was skipped or replaced to make it, by name
    short: int = 0  # when captions are in the order of their lengths: tokens that all but the last eighth fit into
    lengths: tuple[int, ...] = ()  # tokens of each caption, start and end among them; empty when the host cannot tell
    further: FurtherTexts | None = None  # made on the device, where the objective has a use for them

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return Batch(
            images=self.images.to(device, non_blocking=non_blocking),
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            regions=self.regions.to(device, non_blocking=non_blocking),
            phrases=self.phrases.to(device, non_blocking=non_blocking),
            keys=self.keys,
            counts=self.counts,
            short=self.short,
            lengths=self.lengths,
        )

    @property
    def token_groups(self) -> Tensor | tuple[Tensor, Tensor]:
        """The tokens as the text tower reads them: in two groups where that saves padding, else [C, L].

        One caption in a hundred is three times as long as the others; with it in one group all are padded like it.
        """
        if not 0 < self.short < self.tokens.shape[1]:
            return self.tokens
        cut = shorter_captions(len(self))
        return self.tokens[:cut, : self.short], self.tokens[cut:]

    @property
    def padded_length(self) -> float:
        """Tokens, padding included, that the text tower reads of a caption on average."""
        groups = self.token_groups
        return sum(group.numel() for group in groups) / len(self) if isinstance(groups, tuple) else groups.shape[1]


def shorter_captions(count: int) -> int:
    """How many of `count` captions in the order of their lengths make the group of the shorter ones."""
    return count - count // 8
