"""AdamW as CLIP models are trained with it, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from powerclip.train.recipe import OptimSection


def make_optimizer(modules: Iterable[nn.Module], optim: OptimSection) -> torch.optim.AdamW:
    """AdamW over all parameters; gains, biases and scales (everything below two axes) do not decay.

    Each module has its own groups, and scalars have another: sharded and unsharded parameters cannot share a group. A
    checkpoint fits both.
    """
    parameters = [[p for p in module.parameters() if p.requires_grad] for module in modules]
    matrices = [[p for p in module if p.ndim >= 2] for module in parameters]
    vectors = [[p for p in module if p.ndim == 1] for module in parameters]
    scalars = [p for module in parameters for p in module if p.ndim == 0]
    groups = [
        *({"params": group, "weight_decay": optim.weight_decay} for group in matrices),
        *({"params": group, "weight_decay": 0.0} for group in [*vectors, scalars]),
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
