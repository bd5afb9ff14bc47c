"""Student's paired t-test: do two methods differ over the same seeds by more than chance?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev


def paired_p(ours: Sequence[float], baseline: Sequence[float]) -> float | None:
    """The two-sided p-value of the mean difference; value i of both comes from the same seed.

    None with fewer than two pairs: one difference has no standard deviation.
    """
    differences = [one - other for one, other in zip(ours, baseline, strict=True)]
    error = paired_error(ours, baseline)
    if error is None:
        return None
    if error == 0:
        return 1.0 if differences[0] == 0 else 0.0
    return two_sided_p(mean(differences) / error, len(differences) - 1)


def paired_error(ours: Sequence[float], baseline: Sequence[float]) -> float | None:
    """The standard error of the mean difference, over the same pairs; None with fewer than two."""
    differences = [one - other for one, other in zip(ours, baseline, strict=True)]
    return stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None


def two_sided_p(t: float, freedom: int) -> float:
    """P(|T| ≥ |t|) for Student's T with so many degrees of freedom."""
    from scipy.special import stdtr

    if freedom < 1:
        raise ValueError(f"at least one degree of freedom is needed, not {freedom}")
    return float(2 * stdtr(freedom, -abs(t)))
