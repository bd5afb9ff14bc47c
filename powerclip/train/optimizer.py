"""AdamW as CLIP models are trained with it, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from powerclip.train.recipe import OptimSection


def make_optimizer(modules: Iterable[nn.Module], optim: OptimSection) -> torch.optim.AdamW:
    """AdamW over all parameters; gains, biases and scales (everything below two axes) do not decay.

    Each module has groups of its own, and so have single numbers: sharded towers cannot share a group with what is not
    sharded, and a checkpoint fits both.
    """
    parameters = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    matrices = [[p for p in own if p.ndim >= 2] for own in parameters]
    vectors = [[p for p in own if p.ndim == 1] for own in parameters]
    numbers = [p for own in parameters for p in own if p.ndim == 0]
    groups = [
        *({"params": own, "weight_decay": optim.weight_decay} for own in matrices),
        *({"params": own, "weight_decay": 0.0} for own in [*vectors, numbers]),
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        # One pass over memory: 4 ms instead of 13 ms on two cores, most of it the table of token embeddings.
        fused=True,
    )


def learning_rate(step: int, steps: int, optim: OptimSection) -> float:
    """The rate of the update that follows `step` finished ones: linear warm-up, then a cosine down to zero."""
    if step < optim.warmup:
        return optim.lr * (step + 1) / optim.warmup
    if optim.schedule == "constant":
        return optim.lr
    progress = (step - optim.warmup) / max(1, steps - optim.warmup)
    return optim.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
