"""Linear probe: a linear classifier trained on frozen image embeddings, as clip-benchmark trains it.

AdamW without weight decay, a cosine schedule without warm-up, ten epochs at rate 0.1 in batches of 512 on normalised
embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class ProbeSettings:
    """How the classifier is trained."""

    lr: float = 0.1
    epochs: int = 10
    batch_size: int = 512
    seed: int = 0


def batches(count: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """One epoch: all rows in random order, in batches; the last may be smaller."""
    yield from torch.randperm(count, generator=generator).split(batch_size)


def train_probe(
    features: Tensor, labels: Tensor, classes: int, settings: ProbeSettings | None = None
) -> torch.nn.Linear:
    """A linear layer that tells `classes` apart, from features [images, D] and labels [images]."""
    settings = settings or ProbeSettings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        layer = torch.nn.Linear(features.shape[1], classes)
    layer.to(features.device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=settings.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(settings.seed)
    steps = settings.epochs * math.ceil(len(features) / settings.batch_size)
    step = 0
    with torch.enable_grad():
        for _ in range(settings.epochs):
            for rows in batches(len(features), settings.batch_size, generator):
                for group in optimizer.param_groups:
                    group["lr"] = 0.5 * (1 + math.cos(math.pi * step / steps)) * settings.lr
                rows = rows.to(features.device)
                optimizer.zero_grad()
                cross_entropy(layer(features[rows]), labels[rows]).backward()
                optimizer.step()
                step += 1
    return layer
