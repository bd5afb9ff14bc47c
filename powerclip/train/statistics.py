"""What the batches of a run look like: the size of trees and regions, and the memory that it all takes."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from powerclip.data.batch import Batch


def batch_statistics(batch: Batch) -> dict[str, float]:
    """Means over the captions and regions of a batch, as they are logged under `batch/…`.

    Reads back from the GPU: for steps that are logged.
    """
    phrases, pairs = batch.phrases, max(1, len(batch))
    return {
        "batch/tokens": float((batch.tokens != 0).sum()) / pairs,
        "batch/leaves": len(phrases.leaf_start) / pairs,
        "batch/nodes": len(phrases.node_start) / pairs,  # mean K
        "batch/flat_trees": float((phrases.node_offsets.diff() == 1).float().mean()),  # the caption is one phrase
        "batch/region_area": float(batch.regions.float().mean()),  # share of the patches
    }


def memory(device: torch.device) -> dict[str, float]:
    """GiB: of this process in host memory, and the most on its GPU since the start."""
    found = {}
    resident = resident_bytes()
    if resident is not None:
        found["host_gib"] = resident / 2**30
    if device.type == "cuda":
        found["gpu_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def resident_bytes(process: int | str = "self") -> int | None:
    """Resident memory of a process; None where the system does not tell."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
