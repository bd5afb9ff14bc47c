"""Batch normalisation over the batch of all ranks. torch's own synchronised one knows no CPU.

Axes: C rows of this rank · D width
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from powerclip.runtime.distributed import Ranks


def batch_norm(module: nn.BatchNorm1d, values: Tensor, ranks: Ranks) -> Tensor:
    """What `module` would give for these rows [C, D] among those of all ranks, the same number on each."""
    if ranks.is_single or not module.training:
        return module(values)  # type: ignore[no-any-return]
    with torch.autocast(values.device.type, enabled=False):
        rows = values.float()
        # The mean first, then the deviations from it: the difference of two large sums would lose digits.
        mean = ranks.mean(rows.mean(0))
        variance = ranks.mean((rows - mean).square().mean(0))
        _remember(module, mean.detach(), variance.detach(), len(rows) * ranks.count)
        normal = (rows - mean) * (variance + module.eps).rsqrt()
        if module.affine:
            normal = normal * module.weight + module.bias
        return normal.to(values.dtype)


def _remember(module: nn.BatchNorm1d, mean: Tensor, variance: Tensor, count: int) -> None:
    """Move the running statistics as the module does: by the variance without bias."""
    if module.running_mean is None or module.running_var is None or module.num_batches_tracked is None:
        return
    module.num_batches_tracked += 1
    momentum = 0.1 if module.momentum is None else module.momentum
    module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
    module.running_var.lerp_((variance * count / (count - 1)).to(module.running_var.dtype), momentum)
