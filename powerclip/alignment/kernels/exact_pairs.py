"""Exact R2T of chosen pairs with its gradient, in Triton: all 2^M sets of regions, nothing of that size in memory.

R2T is the mean over sets of the best node's sum. Its gradient is known as soon as it is: for each set the regions in it
count once for the node that won, and tied nodes share. So one kernel gives both, and the backward only scales.

Axes: n chosen pairs · K nodes of the longest caption · M regions
"""

# Kernels are Triton's language, not typed Python.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_SETS = 1024


def exact_pairs(q: Tensor, lengths: Tensor, *, empty_set: bool) -> Tensor:
    """Eq. 6 [n] of similarities q [n, K, M], of which a pair's first `lengths[i]` rows are nodes; 0 where none is."""
    return _ExactPairs.apply(q, lengths, empty_set)


class _ExactPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, lengths: Tensor, empty_set: bool) -> Tensor:
        q = q.contiguous()
        pairs, longest, count = q.shape
        scores, gradient = torch.empty(pairs, device=q.device), torch.zeros_like(q)
        # The empty set adds 0 to the sum over sets, so that leaving it out changes only their number.
        share = 1 / (2**count - (0 if empty_set else 1))
        if pairs:
            _mean_of_best[(pairs,)](
                q, lengths, scores, gradient, longest, share, M=count, TILE_S=min(2**count, TILE_SETS)
            )
        ctx.save_for_backward(gradient)
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].view(-1, 1, 1), None, None


@triton.jit
def _mean_of_best(
    q,  # [n, K, M] float32
    lengths,  # [n]
    scores,  # [n] float32
    gradient,  # [n, K, M] float32, zero
    longest,
    share,
    M: tl.constexpr,
    TILE_S: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + pair)
    first = pair * longest * M
    total = tl.zeros((TILE_S,), tl.float32)
    # Where there are no nodes, the sum is over no sets.
    for start in range(0, tl.where(length > 0, 1 << M, 0), TILE_S):
        sets = start + tl.arange(0, TILE_S)
        best = _sums(q + first, sets, M, TILE_S)
        tied = tl.full((TILE_S,), 1.0, tl.float32)
        for node in range(1, length):
            sums = _sums(q + first + node * M, sets, M, TILE_S)
            tied = tl.where(sums > best, 1.0, tl.where(sums == best, tied + 1.0, tied))
            best = tl.maximum(best, sums)
        total += best
        for node in range(length):
            won = tl.where(_sums(q + first + node * M, sets, M, TILE_S) == best, share / tied, 0.0)
            for region in tl.static_range(M):
                mine = tl.sum(tl.where((sets >> region) & 1 == 1, won, 0.0), 0)
                # Only this program adds here, one tile of sets after the other: the order is always the same.
                tl.atomic_add(gradient + first + node * M + region, mine)
    tl.store(scores + pair, share * tl.sum(total, 0))


@triton.jit
def _sums(q, sets, M: tl.constexpr, TILE_S: tl.constexpr):
    """Sums of one node's similarities over each of some sets."""
    total = tl.zeros((TILE_S,), tl.float32)
    for region in tl.static_range(M):
        total += tl.where((sets >> region) & 1 == 1, tl.load(q + region), 0.0)
    return total
