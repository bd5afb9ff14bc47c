"""Random patches and tokens, and a measure of how much memory what is made of them takes."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def draw(count: int, patches: int, tokens: int, width: int = 6, dtype=torch.double):
    generator = torch.Generator().manual_seed(count)
    v = torch.randn(count, patches, width, generator=generator, dtype=dtype).requires_grad_()
    t = torch.randn(count, tokens, width, generator=generator, dtype=dtype).requires_grad_()
    lengths = torch.randint(1, tokens + 1, (count, 1), generator=generator)
    return v, t, torch.arange(tokens) < lengths


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result
