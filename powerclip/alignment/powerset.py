"""The exact powerset similarities, by enumerating every set of regions (Eqs. 5 to 7): the oracle of all fast paths.

Axes: T nodes of all captions · B images · M regions · S captions · D width. `q[t, b, m]` is ⟨φ(I_b | R_m), p_t⟩; by
bilinearity Q_{A,B} = Σ_{m ∈ A} q_m (Eq. 5). A cosine is that over the lengths of r_A and p_B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from powerclip.alignment.pooling import normalise
from powerclip.alignment.ragged import Rows, Segments, segment_max, segment_mean
from powerclip.alignment.regions import SHORTEST_SET, embed_region_sets, subset_matrix


def set_similarities(q: Tensor, *, empty_set: bool = True) -> Tensor:
    """Eq. 5: Q_{A,B} [T, B, 2^M] of every node with every set of regions."""
    subsets = subset_matrix(q.shape[-1], empty=empty_set, device=q.device)
    return q @ subsets.to(q.dtype).T


def set_cosines(regions: Tensor, nodes: Tensor, *, empty_set: bool = True) -> Tensor:
    """Q_{A,B} = ⟨r_A, p_B⟩ / (|r_A| |p_B|) [T, B, 2^M] of every node [T, D] with every set of regions [B, M, D].

    The empty set has no direction: its cosine is 0, as its similarity is in Eq. 5; so is that of vectors that cancel.
    """
    sets = embed_region_sets(regions, empty=empty_set)
    has_direction = sets.norm(dim=-1, keepdim=True) > SHORTEST_SET
    directions = torch.where(has_direction, normalise(torch.where(has_direction, sets, 1.0)), 0.0)
    return torch.einsum("td,bad->tba", normalise(nodes), directions)


def best_node_mean(of_sets: Tensor, segments: Segments | Rows) -> Tensor:
    """Eq. 6: Q→ [S, B] of Q_{A,B} [T, B, 2^M], the mean over sets of regions of the best node's similarity."""
    return segment_max(of_sets, segments).mean(-1)


def best_set_mean(of_sets: Tensor, segments: Segments | Rows) -> Tensor:
    """Eq. 7: Q← [S, B] of Q_{A,B} [T, B, 2^M], the mean over nodes of the best set's similarity."""
    return segment_mean(of_sets.amax(-1), segments)


def exact_r2t(q: Tensor, segments: Segments | Rows, *, empty_set: bool = True) -> Tensor:
    """Eq. 6 from the similarities q [T, B, M] with single regions."""
    return best_node_mean(set_similarities(q, empty_set=empty_set), segments)


def exact_t2r(q: Tensor, segments: Segments | Rows, *, empty_set: bool = True) -> Tensor:
    """Eq. 7 from the similarities q [T, B, M] with single regions."""
    return best_set_mean(set_similarities(q, empty_set=empty_set), segments)
