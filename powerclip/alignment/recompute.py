"""Scores of all pairs whose gradient is computed from the inputs again, block of images by block.

What autograd would keep between forward and backward, several tensors of T × B × M, is never kept. The forward may be a
kernel that autograd cannot differentiate.

Axes: T nodes of all captions · B images · M regions · S captions · D width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.ragged import Segments

# Scores [B, S] of regions [B, M, D] and nodes [T, D].
Forward = Callable[[Tensor, Tensor, Segments, AlignmentConfig], Tensor]
# Gradients of both for a block of images, given the gradient [B, S] of its scores.
Backward = Callable[[Tensor, Tensor, Tensor, Segments, AlignmentConfig], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ScoreImpl:
    """An implementation of the scores of all pairs."""

    forward: Forward
    backward: Backward
    block: int  # images at a time in the backward


def whole_tiles(images: int, tile: int) -> int:
    """At most that many images, but at least a tile of them, in whole tiles.

    A product whose rows do not start at multiples of 16 bytes takes cuBLAS three times as long.
    """
    return max(tile, images - images % tile)


def recompute(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig, impl: ScoreImpl) -> Tensor:
    """S̄ [B, S] of every image's regions [B, M, D] with every caption's nodes [T, D]."""
    return _Recompute.apply(regions, nodes, segments, config, impl)


def by_autograd(forward: Forward) -> Backward:
    """The gradient by autograd of a forward that is made of torch's own operations."""

    def backward(
        regions: Tensor, nodes: Tensor, gradient: Tensor, segments: Segments, config: AlignmentConfig
    ) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            regions, nodes = regions.detach().requires_grad_(), nodes.detach().requires_grad_()
            of_regions, of_nodes = torch.autograd.grad(
                forward(regions, nodes, segments, config), [regions, nodes], gradient
            )
        return of_regions, of_nodes

    return backward


class _Recompute(torch.autograd.Function):
    """Keeps the inputs, nothing of the size T × B."""

    @staticmethod
    def forward(
        ctx: Any, regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig, impl: ScoreImpl
    ) -> Tensor:
        ctx.save_for_backward(regions, nodes)
        ctx.segments, ctx.config, ctx.impl = segments, config, impl
        return impl.forward(regions, nodes, segments, config)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        regions, nodes = ctx.saved_tensors
        of_nodes, of_regions = torch.zeros_like(nodes), []
        blocks = zip(regions.split(ctx.impl.block), gradients[0].split(ctx.impl.block), strict=True)
        for block, gradient in blocks:
            of_block, of_nodes_block = ctx.impl.backward(
                block, nodes, gradient.to(nodes.dtype), ctx.segments, ctx.config
            )
            of_regions.append(of_block)
            of_nodes += of_nodes_block
        return torch.cat(of_regions), of_nodes, None, None, None
