"""A learned factor on similarities, kept where CLIP keeps its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

LARGEST = math.log(100)


def learned_scale(start: float) -> nn.Parameter:
    """The logarithm of a factor that starts at `start`."""
    return nn.Parameter(torch.tensor(math.log(start)))


@torch.no_grad()
def clamp_scale(log_scale: Tensor) -> None:
    """Keep the factor at 100 or below."""
    log_scale.clamp_(max=LARGEST)
