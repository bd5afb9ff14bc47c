"""What several ranks change in a training run: how a batch is shared, and whose gradients are averaged by whom."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from powerclip.errors import UserError
from powerclip.runtime.distributed import Ranks
from powerclip.train.recipe import TrainSection
from powerclip.train.towers import Towers


def check_batch(settings: TrainSection, ranks: Ranks) -> None:
    """UserError unless the batch divides into equal parts, one for each rank and each pass through the towers."""
    parts = ranks.count * settings.accumulate
    if settings.batch_size % parts:
        nearest = max(1, round(settings.batch_size / parts)) * parts
        raise UserError(
            f"train.batch_size is {settings.batch_size}, which {ranks.count} ranks × train.accumulate "
            f"{settings.accumulate} cannot share equally: make it a multiple of {parts}, such as {nearest}"
        )


def wrap(towers: Towers, device: torch.device, ranks: Ranks) -> nn.Module:
    """The towers, their gradients averaged over ranks while the backward pass still runs."""
    from torch.nn.parallel import DistributedDataParallel

    if ranks.is_single:
        return towers
    # Buffers are the same on all ranks and need no message. torch has renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    gpu = [device] if device.type == "cuda" else None
    return DistributedDataParallel(towers, device_ids=gpu, gradient_as_bucket_view=True, **options)


class NullLogger:
    """Stands, on all ranks but the first, where that one has something that writes; takes everything, does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None
