"""Balance by optimal transport: no patch is like everything.

Axes: C images · N patches
"""

from __future__ import annotations

import torch
from torch import Tensor


def balance(similarity: Tensor, epsilon: float = 0.1, iterations: int = 50) -> Tensor:
    """The entropic transport plan [C, N, N] of a symmetric similarity: rows and columns sum to 1.

    Sinkhorn's iteration on K = exp(S/ε). Raw similarities cannot be normalised by their sums, as some are negative. K
    is symmetric, so both scalings are one vector, and the geometric mean of two half-steps converges to it with one
    product an iteration.
    """
    with torch.autocast(similarity.device.type, enabled=False):
        # Shifted to a largest entry of 1: a common factor changes no plan.
        kernel = ((similarity.float() - similarity.float().amax(dim=(1, 2), keepdim=True)) / epsilon).exp()
        scale = kernel.sum(dim=-1, keepdim=True).rsqrt()  # [C, N, 1]
        for _ in range(iterations):
            scale = (scale / (kernel @ scale)).sqrt()
        return scale * kernel * scale.transpose(1, 2)
