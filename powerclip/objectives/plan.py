"""What is drawn for a batch, and decided over the whole of it, before its images go through the towers.

The towers then treat each image by itself, so that a batch can go through them in parts, on one device after the other
or on several at once, and come out the same.

Axes: C images · n patches that stay · V views
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.encoders.selector import PatchContext, Selection
from powerclip.runtime.distributed import SINGLE, Ranks


@dataclass(frozen=True)
class Plan:
    """Row i belongs to image i. What a method does not use is None."""

    kept: Tensor | None = None  # [C, n] the patches that stay
    shown: Tensor | None = None  # [C, n] bool, as in `Selection`
    crops: Tensor | None = None  # [C, V, 4] views of each image

    def rows(self, rows: slice) -> Plan:
        """The plan of some of the images."""
        parts = (None if value is None else value[rows] for value in (self.kept, self.shown, self.crops))
        return Plan(*parts)

    def select(self, context: PatchContext) -> Selection:
        """The patches that stay, as a `PatchSelector` gives them."""
        assert self.kept is not None
        return Selection(self.kept, self.shown)


@dataclass(frozen=True)
class Draws:
    """Uniform numbers for the rows of this rank.

    All ranks draw for the whole batch, with generators of one seed, and each keeps its rows: an image gets the same
    numbers on any number of ranks. Without a generator torch's own is used.
    """

    device: torch.device
    generator: torch.Generator | None = None
    ranks: Ranks = SINGLE

    def __call__(self, count: int, *shape: int) -> Tensor:
        """Numbers [count, *shape] in [0, 1)."""
        drawn = torch.rand(count * self.ranks.count, *shape, generator=self.generator, device=self.device)
        return drawn[self.ranks.rows(count)]
