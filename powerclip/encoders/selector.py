"""Which patches stay: the hook for methods that drop patches before the image tower's transformer.

Axes: C pairs · N patches · n patches that stay · D the tower's own width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class PatchContext:
    """What a selector may look at."""

    images: Tensor  # [C, 3, H, W] normalised
    patches: Tensor  # [C, N, D] embedded, position added, before the transformer


@dataclass(frozen=True)
class Selection:
    """The patches that stay. Where images show different numbers of them, n is the largest and some are hidden."""

    kept: Tensor  # [C, n] indices into the N patches, ascending in each row as selectors give them, n ≥ 1
    shown: Tensor | None = None  # [C, n] bool: false for a patch that only fills up its row; None when all are shown


class PatchSelector(Protocol):
    """Chooses the patches that the transformer sees; the class token always stays."""

    def __call__(self, context: PatchContext) -> Tensor | Selection:
        """A `Selection`, or its indices [C, n] alone when every image shows the same number of patches."""
        ...


@dataclass(frozen=True)
class RandomPatches:
    """Keeps a random share of the patches, drawn anew for each image."""

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep is a share in (0, 1], not {self.keep}")

    def __call__(self, context: PatchContext) -> Tensor:
        """Draw the indices [C, n] on the device of the patches."""
        return self.choose(torch.rand(context.patches.shape[:2], device=context.patches.device))

    def choose(self, noise: Tensor) -> Tensor:
        """The indices [C, n] that uniform numbers [C, N] decide on."""
        return noise.topk(max(1, int(noise.shape[1] * self.keep)), dim=1).indices.sort(dim=1).values


def keep_patches(patches: Tensor, kept: Tensor) -> Tensor:
    """The rows `kept` [C, n] of `patches` [C, N, D], as [C, n, D]."""
    if kept.ndim != 2 or kept.shape[0] != patches.shape[0] or kept.shape[1] == 0:
        raise ValueError(f"a patch selector returns indices [{patches.shape[0]}, n] with n ≥ 1, not {list(kept.shape)}")
    return patches.gather(1, kept.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
