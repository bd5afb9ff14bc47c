"""When a loss or a gradient is not finite: the update is left out and counted, and a run that cannot recover stops.

Nothing here makes the host wait for a GPU that is busy. The optimiser's fused kernel reads a flag on the device and,
where it is set, leaves weights, moments and step counts as they were; the host reads what happened two steps later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from powerclip.errors import UserError
from powerclip.objectives import Terms

# Steps that the host may be ahead of a GPU; more would only queue memory.
LAG = 2


def mark_loss(total: Tensor) -> Tensor:
    """The loss itself when it is finite; otherwise one whose gradient is NaN.

    An infinite loss may have a finite gradient, and on one rank only. This way the norm of the gradient, which all
    ranks share, is NaN on all of them, without another message.
    """
    value = total.detach()
    return total * torch.where(value.isfinite(), torch.ones_like(value), torch.full_like(value, math.nan))


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Take the optimiser's step, or none at all when the norm of the gradient is NaN or infinite."""
    bad = ~norm.detach().isfinite()
    if all(group.get("fused") for group in optimizer.param_groups):
        # What torch's GradScaler hands to fused optimisers: the flag is read on the device.
        flagged: Any = optimizer
        flagged.grad_scale, flagged.found_inf = None, bad.float()
        optimizer.step()
    elif not bool(bad):
        optimizer.step()


@dataclass(frozen=True)
class _StepValues:
    """Loss, norm and logged parts of a step, on their way to the host."""

    step: int
    names: tuple[str, ...]
    values: Tensor  # in the order of `names`
    arrived: torch.cuda.Event | None


class Guard:
    """Counts the updates that were left out; UserError when more than `max_skipped` of them come in a row.

    Args:
        max_skipped: `train.max_skipped`.
        modules: what is trained; searched for values that are not finite when a step fails.
        warn: called for the first of a row of updates that were skipped.
    """

    def __init__(self, max_skipped: int, modules: Sequence[nn.Module], warn: Callable[[str], None]):
        self.skipped = 0  # in the whole run
        self._row = 0
        self._max_skipped, self._modules, self._warn = max_skipped, tuple(modules), warn
        self._waiting: deque[_StepValues] = deque()

    def check(self, step: int, terms: Terms, norm: Tensor) -> None:
        """Check a step that was just done; on a GPU the one `LAG` before it, which the host need not wait for."""
        named = {"loss": terms.total, "gradient norm": norm, **terms.parts}
        values = torch.stack([value.detach().float() for value in named.values()])
        arrived = None
        if values.device.type == "cuda":
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append(_StepValues(step, tuple(named), values, arrived))
        while len(self._waiting) > (LAG if arrived else 0):
            self._inspect(self._waiting.popleft())

    def flush(self) -> None:
        """Check every step that was done: before weights are written, and at the end."""
        while self._waiting:
            self._inspect(self._waiting.popleft())

    def snapshot(self) -> dict[str, int]:
        """What `restore` brings back."""
        return {"skipped": self.skipped, "row": self._row}

    def restore(self, saved: Mapping[str, int]) -> None:
        """Go on counting where a checkpoint stopped."""
        self.skipped, self._row = saved.get("skipped", 0), saved.get("row", 0)

    def _inspect(self, values: _StepValues) -> None:
        if values.arrived is not None:
            values.arrived.synchronize()
        numbers = dict(zip(values.names, values.values.tolist(), strict=True))
        if math.isfinite(numbers["loss"]) and math.isfinite(numbers["gradient norm"]):
            self._row = 0
            return
        self.skipped += 1
        self._row += 1
        shown = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
        broken = not_finite(self._modules)
        if broken:
            raise UserError(
                f"training diverged at step {values.step}: {shown}. Weights that are no longer finite: "
                f"{_some(broken)}. Go back to a checkpoint and try a smaller optim.lr, a longer optim.warmup or "
                "optim.grad_clip=1"
            )
        if self._row > self._max_skipped:
            raise UserError(
                f"training diverged: {self._row} updates in a row, up to step {values.step}, had a loss or a gradient "
                f"that is not finite and were left out ({shown}; {self._where()}). The weights are finite: try a "
                "smaller optim.lr, a longer optim.warmup or optim.grad_clip=1, look at the data of these steps, or "
                "allow more with train.max_skipped"
            )
        if self._row == 1:
            self._warn(f"step {values.step}: {shown}; the update was left out")

    def _where(self) -> str:
        bad = not_finite(self._modules, gradients=True)
        return f"gradients that are not finite: {_some(bad)}" if bad else "the last gradient is finite again"


def not_finite(modules: Sequence[nn.Module], *, gradients: bool = False) -> list[str]:
    """Names of the parameters that hold a NaN or an infinity, themselves or in their gradient."""
    names = []
    for module in modules:
        for name, parameter in module.named_parameters():
            values: Any = parameter.grad if gradients else parameter
            if values is None:
                continue
            # Of a sharded parameter only the local part is checked: gathering all of it needs a collective.
            values = values.to_local() if hasattr(values, "to_local") else values
            if not bool(values.detach().isfinite().all()):
                names.append(name)
    return names


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
