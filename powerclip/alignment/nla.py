"""Non-linear aggregators (§4): both powerset similarities in time linear in the number of regions.

Axes: T nodes of all captions · B images · M regions · S captions
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.ragged import Rows, Segments, segment_logsumexp, segment_mean

Activation = Callable[[Tensor], Tensor]


def log_cosh(x: Tensor) -> Tensor:
    """Log cosh x without overflow: arguments reach ±1e4 at τ = 0.001."""
    return x.abs() + torch.log1p(torch.exp(-2 * x.abs())) - math.log(2)


# Act of Definition 1.
T1_ACTIVATIONS: dict[str, Activation] = {
    "softplus": F.softplus,
    "relu": F.relu,
    "gelu": F.gelu,
    "swish": F.silu,
}

# ∫ Act of Definition 2: the antiderivative that is 0 at 0.
T2_ANTIDERIVATIVES: dict[str, Activation] = {
    "tanh": log_cosh,
    "sigmoid": lambda x: F.softplus(x) - math.log(2),
    "softsign": lambda x: x.abs() - torch.log1p(x.abs()),
}


def log_powerset(x: Tensor, *, empty_set: bool = True) -> Tensor:
    """log Σ_A exp Σ_{m ∈ A} x_m over all sets A of the last axis (Lemma A.1's sum), or over the non-empty ones.

    With L = Σ_m softplus(x_m) the first is L itself, the second log(e^L − 1) = L + log(1 − e^−L).
    """
    total = F.softplus(x).sum(-1)
    if empty_set:
        return total
    # When every x_m is far below zero L vanishes in rounding; then only single regions count: log Σ_m exp x_m.
    far = x.amax(-1) < math.log(torch.finfo(x.dtype).eps)
    total = torch.where(far, 1.0, total)  # keeps the untaken branch finite, and so its gradient
    return torch.where(far, torch.logsumexp(x, -1), total + torch.log(-torch.expm1(-total)))


def nla_t1(
    q: Tensor, segments: Segments | Rows, tau: float, act: str = "softplus", *, empty_set: bool = True
) -> Tensor:
    """Definition 1: NLA-T1, the soft T2R similarity [S, B] of q [T, B, M]; with relu the exact one (Corollary 1)."""
    if empty_set:
        best = tau * T1_ACTIVATIONS[act](q / tau).sum(-1)
    elif act == "softplus":
        best = tau * log_powerset(q / tau, empty_set=False)
    else:
        # The best non-empty set: all positive regions or, where there is none, the least negative one.
        highest = q.amax(-1)
        best = torch.where(highest > 0, F.relu(q).sum(-1), highest)
    return segment_mean(best, segments)


def nla_t2(
    q: Tensor, segments: Segments | Rows, tau: float, alpha: float, act: str = "tanh", *, empty_set: bool = True
) -> Tensor:
    """Definition 2: NLA-T2, the R2T similarity [S, B] of q [T, B, M] between its two bounds.

    With tanh, Σ_m ζ_α(x_m/2) = (1−α)·E_A[Σ_A x] + α·(log Σ_A exp Σ_A x − log 2^M) for x = q/τ: the mean over the sets
    and the soft maximum over them. So leaving ∅ out changes only the mean, the sum and the number of the sets.
    """
    x = q / tau
    if act == "tanh":
        sets = 2 ** x.shape[-1] - (0 if empty_set else 1)
        mean = x.sum(-1) * (2 ** (x.shape[-1] - 1) / sets)  # each region is in half of the 2^M sets
        inner = (1 - alpha) * mean + alpha * (log_powerset(x, empty_set=empty_set) - math.log(sets))
    else:
        inner = (x / 2 + alpha * T2_ANTIDERIVATIVES[act](x / 2)).sum(-1)
    outer = segment_logsumexp(inner, segments)
    return tau * (outer - (1 - alpha) * segments.lengths_like(outer).log())
