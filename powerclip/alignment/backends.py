"""Which implementation scores the pairs: `reference`, `torch` or `triton`, by device or as the settings say.

| backend   | is                                                                              | runs on    |
|-----------|---------------------------------------------------------------------------------|------------|
| reference | the formulas as they are written, differentiated by autograd                    | everything |
| torch     | compiled on a GPU; on a CPU in blocks of images with the gradient in closed form | everything |
| triton    | fused kernels that score and differentiate                                      | NVIDIA GPU |

`auto` is `triton` on a GPU where the kernels support the settings, else `torch`. On a CPU `torch` has a closed form for
NLA and for exact scores where `unsupported_setting` says None; elsewhere it computes the formulas of `reference`.

Axes: M regions
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass

import torch

from powerclip.alignment.config import AlignmentConfig, Backend


def choose_backend(config: AlignmentConfig, device: torch.device) -> Backend:
    """The backend for tensors on `device`; `ValueError`, with the reason, when the one in `config` cannot be used."""
    if config.backend == "auto":
        return "triton" if device.type == "cuda" and triton_obstacle(config, device) is None else "torch"
    if config.backend == "triton" and (obstacle := triton_obstacle(config, device)):
        raise ValueError(f"alignment.backend: triton {obstacle}; use auto, torch or reference")
    return config.backend


def triton_obstacle(config: AlignmentConfig, device: torch.device) -> str | None:
    """Why the Triton kernels cannot score under these settings on `device`; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "is not installed (pip install triton)"
    if device.type != "cuda" and not is_interpreted():
        return f"needs an NVIDIA GPU, and the tensors are on {device.type} (TRITON_INTERPRET=1 interprets it, slowly)"
    return unsupported_setting(config)


def unsupported_setting(config: AlignmentConfig) -> str | None:
    """Which of the settings has none of the closed forms that are scored and differentiated by hand; None if all do."""
    if not config.region_sets:
        return "scores sets of regions, and alignment.region_sets is false"
    if config.largest_set > 1 and not config.divides_by_lengths:
        return f"knows alignment.largest_set 0 and 1, not {config.largest_set}"
    if config.aggregation == "nla":
        if config.t2r and not config.largest_set and config.t1 != "softplus":
            return f"knows alignment.t1 softplus, not {config.t1}"
        if config.r2t and config.t2 != "tanh":
            return f"knows alignment.t2 tanh, not {config.t2}"
    return None


def is_interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class KernelSettings:
    """The settings as the closed forms take them, for images of M regions."""

    tau: float
    t2r_unit: float  # 1, or 1/M where T2R is a mean over regions
    r2t_unit: float  # likewise R2T
    mean_weight: float  # of Σ x in NLA-T2's inner sum: each region is in half of the 2^M sets
    alpha: float
    log_sets: float  # log of the number of sets
    sets: int
    switches: dict[str, bool]  # compile-time constants of the Triton kernels

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
        """The arguments of the NLA kernels, in their order."""
        return self.tau, self.t2r_unit, self.r2t_unit, self.mean_weight, self.alpha, self.log_sets
