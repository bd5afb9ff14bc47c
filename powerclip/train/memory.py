"""When a run does not fit into a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from powerclip.errors import UserError


@contextmanager
def enough_memory() -> Iterator[None]:
    """UserError, with what helps, when a GPU's memory runs out."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            "the GPU's memory ran out: lower train.batch_size, or keep the batch with train.accumulate=4, "
            "train.checkpoint_activations=true or, on several GPUs, train.sharding=full"
        ) from None
