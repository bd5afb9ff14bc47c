"""What the two towers give for a batch: global and dense embeddings.

Axes: C pairs · N patches · L tokens · D width · n patches that stayed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_dataclass


@dataclass(frozen=True)
class ImageFeatures:
    """Embeddings of C images, from one forward pass of the image tower."""

    image: Tensor  # [C, D] L2-normalised
    patches: Tensor  # [C, N, D], or [C, n, D] where a selector dropped some
    kept: Tensor | None = None  # [C, n] grid indices of the patches that stayed, None when all did
    shown: Tensor | None = None  # [C, n] bool: those of `kept` that were attended to, None when all were
    extra: Any = None  # what only the loss of one method needs: a registered dataclass of tensors [C, …]


@dataclass(frozen=True, kw_only=True)
class Features(ImageFeatures):
    """Embeddings of C images and C captions, from one forward pass of each tower.

    Dense features are projected but not normalised: phrases and regions sum them first and normalise once, after
    the sum (Eqs. 2 and 4). Words at padded positions carry no meaning and may even be NaN in a compiled tower:
    select the real ones, never multiply by a mask.
    """

    text: Tensor  # [C, D] L2-normalised
    words: Tensor  # [C, L, D]
    logit_scale: Tensor  # scalar, the factor itself (not its logarithm)
    logit_bias: Tensor | None = None  # scalar, of models trained with a sigmoid loss
    further_text: Tensor | None = None  # [E, D] L2-normalised, of further texts where an objective has some
    further_words: Tensor | None = None  # [E, L', D]


# FSDP finds the tensors of a module's output as leaves of torch's pytree; newer releases look into any dataclass.
register_dataclass(Features)
