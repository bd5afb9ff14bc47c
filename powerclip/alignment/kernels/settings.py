"""What the kernels are told of the settings.

Axes: M regions
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from powerclip.alignment.config import AlignmentConfig


@dataclass(frozen=True)
class KernelSettings:
    """The settings for images of M regions."""

    tau: float
    t2r_unit: float  # 1, or 1/M where T2R is a mean over regions
    r2t_unit: float  # likewise R2T
    mean_weight: float  # of Σ x in NLA-T2's inner sum: each region is in half of the 2^M sets
    alpha: float
    log_sets: float  # log of how many sets there are
    sets: int
    switches: dict[str, bool]

    @classmethod
    def of(cls, config: AlignmentConfig, count: int) -> KernelSettings:
        """Those of `config` for M = `count`."""
        sets = 2**count - (0 if config.empty_set else 1)
        mean = config.similarity == "mean"
        return cls(
            tau=config.tau,
            t2r_unit=1 / (count if mean and config.largest_set != 1 else 1),
            r2t_unit=1 / (count if mean else 1),
            mean_weight=(1 - config.alpha) * 2 ** (count - 1) / sets,
            alpha=float(config.alpha),
            log_sets=math.log(sets),
            sets=sets,
            switches={
                "EMPTY": config.empty_set,
                "SINGLE": config.largest_set == 1,
                "T2R": config.t2r,
                "R2T": config.r2t,
            },
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        """What the approximation's kernels take, in their order."""
        return self.tau, self.t2r_unit, self.r2t_unit, self.mean_weight, self.alpha, self.log_sets
