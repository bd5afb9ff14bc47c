"""Which implementation scores the pairs: `reference`, `torch` or `triton`, by device or as the settings say.

| backend   | is                                                                    | runs on    |
|-----------|-----------------------------------------------------------------------|------------|
| reference | the formulas as they are written, differentiated by autograd          | everything |
| torch     | compiled on a GPU; on a CPU in blocks, with its gradient recomputed    | everything |
| triton    | fused kernels that score and differentiate                            | NVIDIA GPU |

`auto` is `triton` on a GPU where the kernels know the settings, else `torch`; on a CPU it is `reference`.
"""

from __future__ import annotations

import importlib.util
import os

import torch

from powerclip.alignment.config import AlignmentConfig, Backend


def choose(config: AlignmentConfig, device: torch.device) -> Backend:
    """The backend for tensors on `device`. Raises `ValueError`, saying what is missing, when a forced one cannot be."""
    if config.backend == "auto":
        if device.type != "cuda":
            return "reference"
        return "torch" if triton_obstacle(config, device) else "triton"
    if config.backend == "triton" and (obstacle := triton_obstacle(config, device)):
        raise ValueError(f"alignment.backend: triton {obstacle}; use auto, torch or reference")
    return config.backend


def triton_obstacle(config: AlignmentConfig, device: torch.device) -> str | None:
    """Why the Triton kernels cannot score under these settings on `device`; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "is not installed (pip install triton)"
    if device.type != "cuda" and not interpreting():
        return f"needs an NVIDIA GPU, and the tensors are on {device.type} (TRITON_INTERPRET=1 interprets it, slowly)"
    return unknown_setting(config)


def unknown_setting(config: AlignmentConfig) -> str | None:
    """Which of the settings has none of the closed forms that are scored and differentiated by hand; None if all do."""
    if not config.region_sets:
        return "scores sets of regions, and alignment.region_sets is false"
    if config.largest_set > 1:
        return f"knows alignment.largest_set 0 and 1, not {config.largest_set}"
    if config.aggregation == "nla":
        if config.t2r and not config.largest_set and config.t1 != "softplus":
            return f"knows alignment.t1 softplus, not {config.t1}"
        if config.r2t and config.t2 != "tanh":
            return f"knows alignment.t2 tanh, not {config.t2}"
    return None


def interpreting() -> bool:
    """Whether Triton interprets its kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
