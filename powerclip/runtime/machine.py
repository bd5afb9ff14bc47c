"""The machine that a result was measured on, in a few words."""

from __future__ import annotations

import platform

import torch


def machine() -> str:
    """`NVIDIA H200, torch 2.15.0`, or the number of CPU threads where there is no GPU."""
    if torch.cuda.is_available():
        where = torch.cuda.get_device_name()
    else:
        threads = torch.get_num_threads()
        where = f"{threads} CPU thread{'s' if threads > 1 else ''} ({platform.machine()})"
    return f"{where}, torch {torch.__version__}"
