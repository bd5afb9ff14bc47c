"""The last step of either tower: from its own width to the shared one."""

from __future__ import annotations

from torch import Tensor, nn


def project(features: Tensor, projection: nn.Linear | Tensor | None) -> Tensor:
    """Map features [..., width] to the shared space; open_clip keeps a matrix, a linear layer or nothing."""
    if projection is None:
        return features
    if isinstance(projection, nn.Linear):
        return projection(features)
    return features @ projection
