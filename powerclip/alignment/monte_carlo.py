"""R2T from a sample of the sets of regions, for more regions than can be enumerated: unbiased, with its error.

Q→ is a mean over 2^M sets; the mean over sets that are drawn uniformly has the same expectation. The same sets serve
all pairs, so that captions compete on equal terms.

Axes: T nodes of all captions · B images · M regions · S captions · n drawn sets
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from powerclip.alignment.ragged import Segments, segment_max

# Most elements of the similarities of one block of sets: 256 MB in float32.
BLOCK_ELEMENTS = 2**26


@dataclass(frozen=True)
class Estimate:
    """A mean over drawn sets and what is known about its error."""

    mean: Tensor  # [S, B]
    standard_error: Tensor  # [S, B] of the mean


def sample_sets(sets: int, regions: int, *, empty_set: bool = True, generator: torch.Generator | None = None) -> Tensor:
    """Sets drawn uniformly and independently, as rows of zeros and ones [n, M]; without ∅, from the others."""
    device = generator.device if generator is not None else "cpu"

    def draw(count: int) -> Tensor:
        return torch.randint(2, (count, regions), generator=generator, device=device)

    drawn = draw(sets)
    while not empty_set and (empty := drawn.sum(-1) == 0).any():
        drawn[empty] = draw(int(empty.sum()))
    return drawn


def monte_carlo_r2t(
    q: Tensor,
    segments: Segments,
    sets: int,
    *,
    empty_set: bool = True,
    generator: torch.Generator | None = None,
) -> Estimate:
    """Eq. 6 estimated: Q→ [S, B] of q [T, B, M] from `sets` drawn sets, at least 2; without bias.

    Gradients flow as through the exact one.
    """
    if sets < 2:
        raise ValueError(f"a standard error needs at least 2 drawn sets, not {sets}")
    drawn = sample_sets(sets, q.shape[-1], empty_set=empty_set, generator=generator).to(q.device, q.dtype)
    best = [
        segment_max(q @ block.T, segments)  # [S, B, n of the block]
        for block in drawn.split(max(1, BLOCK_ELEMENTS // (q.shape[0] * q.shape[1])))
    ]
    # Two passes over what is kept, S × B × n: a running variance would lose digits.
    values = torch.cat(best, -1)
    variance, mean = torch.var_mean(values, -1)
    return Estimate(mean, (variance.detach() / sets).sqrt())
