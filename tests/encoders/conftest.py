"""A batch for the tiny towers."""

import pytest
import torch
from tiny_towers import captions
from torch import Tensor


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tokens() -> Tensor:
    return captions(9, 4, 12)
