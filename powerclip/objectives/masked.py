"""What the methods that mask clusters share: CLIP's loss on the patches that a method's own `select` leaves."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from powerclip.encoders.selector import PatchContext, Selection
from powerclip.objectives.clip import Clip

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder, Features


class MaskedClip(Clip):
    """CLIP's loss of images without some of their patches."""

    def encode(self, encoder: DualEncoder, images: Tensor, tokens: Tensor) -> Features:
        """Drop the patches that are not selected."""
        grid = encoder.grid
        return encoder(images, tokens, selector=lambda context: self.select(context, grid))

    @abstractmethod
    def select(self, context: PatchContext, grid: tuple[int, int]) -> Selection:
        """The patches that stay."""
