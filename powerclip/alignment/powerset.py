"""The exact powerset similarities, by enumerating every set of regions (Eqs. 5 to 7): the oracle of all fast paths.

Axes: T nodes of all captions · B images · M regions · S captions. `q[t, b, m]` is ⟨φ(I_b | R_m), p_t⟩; by bilinearity
Q_{A,B} = Σ_{m ∈ A} q_m (Eq. 5).
"""

from __future__ import annotations

from torch import Tensor

from powerclip.alignment.ragged import Rows, Segments, segment_max, segment_mean
from powerclip.alignment.regions import subset_matrix


def set_similarities(q: Tensor, *, empty_set: bool = True) -> Tensor:
    """Eq. 5: Q_{A,B} [T, B, 2^M] of every node with every set of regions."""
    subsets = subset_matrix(q.shape[-1], empty=empty_set, device=q.device)
    return q @ subsets.to(q.dtype).T


def exact_r2t(q: Tensor, segments: Segments | Rows, *, empty_set: bool = True) -> Tensor:
    """Eq. 6: Q→ [S, B], the mean over sets of regions of the best node's similarity."""
    return segment_max(set_similarities(q, empty_set=empty_set), segments).mean(-1)


def exact_t2r(q: Tensor, segments: Segments | Rows, *, empty_set: bool = True) -> Tensor:
    """Eq. 7: Q← [S, B], the mean over nodes of the best set's similarity."""
    return segment_mean(set_similarities(q, empty_set=empty_set).amax(-1), segments)
