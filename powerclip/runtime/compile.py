"""Compiling functions whose shapes are known: one compilation for each shape that a process meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Lengths of token rows × objectives × models that one process may meet; torch's own limit of 8 would silently go back
# to eager.
MOST_VARIANTS = 64


def compile_shapes(
    function: Callable[..., Any], backend: str | Callable[..., Any] = "inductor", mode: str | None = None
) -> Callable[..., Any]:
    """The function, compiled anew for every combination of shapes."""
    raise_limit()
    return torch.compile(function, dynamic=False, backend=backend, mode=mode)


def raise_limit() -> None:
    """Let torch compile one function as often as `MOST_VARIANTS` says."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_VARIANTS)
