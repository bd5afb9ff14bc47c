"""Kernels run on the GPU where there is one; elsewhere Triton interprets them, if it is told so before its import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def small_tiles(monkeypatch):
    """In the interpreter: tiles of which even small instances fill several.

    It computes a tile number by number, also what lies beyond the instance; tiles for a GPU would be little else.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr("powerclip.alignment.kernels.pairs.SMALLEST", 4)
