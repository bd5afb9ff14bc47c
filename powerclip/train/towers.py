"""How the towers run while training: in which precision, and compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from powerclip.objectives import Objective, encode
from powerclip.train.recipe import TrainSection

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder, Features

# Lengths of token rows × objectives × models that one process may meet; torch's own limit of 8 would silently go back
# to eager.
MOST_VARIANTS = 64


def in_bf16(settings: TrainSection, device: torch.device) -> bool:
    """Whether the towers compute in bf16 under these settings."""
    return settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda")


def is_compiled(settings: TrainSection, device: torch.device) -> bool:
    """Whether the towers are compiled under these settings."""
    return settings.compile == "always" or (settings.compile == "auto" and device.type == "cuda")


def run_towers(
    settings: TrainSection, objective: Objective, encoder: DualEncoder, images: Tensor, tokens: Tensor
) -> Features:
    """The features of a batch as `objective` needs them."""
    device = images.device
    run = compiled_encode() if is_compiled(settings, device) else encode
    with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16(settings, device)):
        return run(objective, encoder, images, tokens)


@cache
def compiled_encode(backend: str | Callable[..., Any] = "inductor") -> Callable[..., Features]:
    """`encode`, compiled once for a process: later runs with towers of the same structure find it warm."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_VARIANTS)
    return torch.compile(encode, dynamic=False, backend=backend)
