"""A phrase's best set of regions with the share of each region in its score, and a pair's scores by both aggregations.

Three ways to compare a set A of regions with a phrase B, given q_m = ⟨φ_m, p_B⟩:

    sum      Q(A, B) = Σ_A q_m, as the paper prints it (Eq. 5); the empty set is one of the sets and scores 0
    mean     the mean over A of q_m / |B|, |B| the leaves of the phrase: the best set is always one region, and this
             is T2R with this package's defaults (`alignment.similarity: mean`, `largest_set: 1`)
    cosine   Q(A, B) = ⟨φ_A, p_B⟩ / (|φ_A| |p_B|), φ_A = Σ_A φ_m: a region that does not belong lowers the score, a
             second one that does raises it, unless the two look alike
    relative the sum of cosines of φ_m and p_B less their means over phrases and over regions: the regions that the
             phrase prefers more than the other phrases do, and more than other regions

In all of them the score is the sum of its regions' shares. Sums and means are aggregated by `alignment.score`, exactly
or by NLA; no linear-time form is known for cosines, which are enumerated.

Axes: K phrases of one caption · M regions of one image · D width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.ragged import Rows
from powerclip.alignment.regions import subset_matrix
from powerclip.alignment.score import aggregate
from powerclip.errors import UserError
from powerclip.evaluate.metrics import relative_similarities

Similarity = Literal["sum", "mean", "cosine", "relative"]
Aggregation = Literal["exact", "nla"]

SIMILARITIES: tuple[Similarity, ...] = ("sum", "mean", "cosine", "relative")
AGGREGATIONS: tuple[Aggregation, ...] = ("exact", "nla")
MOST_REGIONS = 12  # 4,096 sets: enumerated in a few milliseconds
_TIE = 1e-6  # scores nearer than this are equal: the smaller set is shown


@dataclass(frozen=True)
class SetScores:
    """How the phrases of a caption and the sets of an image's regions fit."""

    best: Tensor  # [K, M] bool: the regions of each phrase's best set
    shares: Tensor  # [K, M] what each region adds to the phrase's score: their sum is the score
    t2r: float  # the mean over phrases of the best set's score (Eq. 7)
    r2t: float  # the mean over sets of the best phrase's score (Eq. 6)

    @property
    def scores(self) -> Tensor:
        """Each phrase's score with its best set [K]."""
        return self.shares.sum(-1)


def score_sets(
    regions: Tensor,
    phrases: Tensor,
    leaves: Tensor,
    *,
    similarity: Similarity = "cosine",
    aggregation: Aggregation = "exact",
    tau: float = 0.001,
    alpha: float = 0.75,
) -> SetScores:
    """The best sets of regions [M, D] for phrases [K, D], and the scores of the pair.

    Args:
        regions: φ_m, normalised.
        phrases: p_B, sums of leaves.
        leaves: how many leaves each phrase has [K].
        similarity: how a set is compared with a phrase.
        aggregation: `exact`, over all 2^M sets, or `nla`, the paper's approximation.
        tau: temperature of NLA.
        alpha: α of NLA-T2.

    Raises:
        UserError: too many regions to enumerate, or cosines by NLA.
    """
    check_sets(len(regions), similarity, aggregation)
    regions, phrases = regions.double(), phrases.double()
    if similarity == "cosine":
        return _cosines(regions, phrases)
    preset: Literal["paper", "default"] = "default" if similarity == "mean" else "paper"
    if similarity == "relative":
        q = relative_similarities(F.normalize(phrases, dim=-1) @ regions.T)
    else:
        q = (phrases if similarity == "sum" else phrases / leaves.unsqueeze(-1)) @ regions.T
    t2r, r2t = (
        float(
            aggregate(
                q.unsqueeze(1),
                Rows(torch.tensor([len(q)]), len(q)),
                AlignmentConfig.named(
                    preset, aggregation=aggregation, tau=tau, alpha=alpha, t2r=t2r, r2t=not t2r, backend="reference"
                ),
            )
        )
        for t2r in (True, False)
    )
    if similarity == "mean":
        best = F.one_hot(q.argmax(-1), len(regions)).bool()
        return SetScores(best, torch.where(best, q, 0.0), t2r, r2t)
    # NLA-T1 is a sum over regions too: each has its part of it, also those just below zero.
    shares = F.relu(q) if aggregation == "exact" else tau * F.softplus(q / tau)
    return SetScores(q > 0, shares, t2r, r2t)


def check_sets(regions: int, similarity: Similarity, aggregation: Aggregation) -> None:
    """UserError for what `score_sets` cannot do."""
    if similarity not in SIMILARITIES:
        raise UserError(f"sets are compared by {', '.join(SIMILARITIES)}, not {similarity!r}")
    if aggregation not in AGGREGATIONS:
        raise UserError(f"the aggregation is {' or '.join(AGGREGATIONS)}, not {aggregation!r}")
    if not 1 <= regions <= MOST_REGIONS:
        raise UserError(f"{regions} regions: sets of 1 to {MOST_REGIONS} can be enumerated")
    if similarity == "cosine" and aggregation == "nla":
        raise UserError(
            "cosines of sets have no approximation: use aggregation exact, or similarity sum, mean or relative"
        )


def _cosines(regions: Tensor, phrases: Tensor) -> SetScores:
    sets = subset_matrix(len(regions), empty=False).double()
    # Small sets first, so that of equal sets the smallest is found.
    sets = sets[sets.sum(1).argsort(stable=True)]
    q = F.normalize(phrases, dim=-1) @ regions.T
    lengths = torch.linalg.vector_norm(sets @ regions, dim=-1).clamp(min=1e-12)
    scores = q @ sets.T / lengths  # [K, sets]
    first = (scores >= scores.amax(-1, keepdim=True) - _TIE).double().argmax(-1)
    best = sets[first].bool()
    shares = torch.where(best, q / lengths[first].unsqueeze(-1), 0.0)
    return SetScores(best, shares, float(shares.sum(-1).mean()), float(scores.amax(0).mean()))
