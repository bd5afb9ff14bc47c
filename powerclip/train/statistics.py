"""What is measured of a run: its speed, its batches, its memory, and whether the alignment has collapsed."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from powerclip.data.batch import Batch

T = TypeVar("T")

# Terms that are shown beside the loss when the objective reports them; the files have all of them.
SHOWN = ("clip", "alignment", "violation")
# Not noise after so many steps in a row: while the alignment learns, some rows of a batch are ranked right.
WINDOW = 50
DEAD = 0.99


class StepTimer:
    """Times the steps of a run that begins after `step`; what happens in `pause` does not count."""

    def __init__(self, step: int, batch_size: int):
        self._batch_size = batch_size
        self._since, self._step = time.perf_counter(), step
        self._waited = 0.0

    def time_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the time that it takes to get each of them is added up.

        A GPU may still be busy with earlier steps meanwhile: the share is an upper bound of what is lost.
        """
        source = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._waited += time.perf_counter() - began
            yield batch

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what happens inside: the speed is that of training."""
        paused = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - paused

    def read(self, step: int) -> dict[str, float]:
        """`samples_per_second` and `data_wait`, a share of the time, since the last reading."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        rates = {
            "samples_per_second": (step - self._step) * self._batch_size / seconds,
            "data_wait": min(1.0, self._waited / seconds),
        }
        self._since, self._step, self._waited = now, step, 0.0
        return rates


def batch_statistics(batch: Batch) -> dict[str, float]:
    """Means over the captions and regions of a batch, as they are logged under `batch/…`.

    Needs a device sync: only for steps that are logged.
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
    gib = {}
    resident = resident_bytes()
    if resident is not None:
        gib["host_gib"] = resident / 2**30
    if device.type == "cuda":
        gib["gpu_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return gib


def resident_bytes(process: int | str = "self") -> int | None:
    """Resident memory of a process; None where the system has no /proc."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def describe_terms(values: Mapping[str, float]) -> str:
    """The loss, its main terms and the speed of a logged step, as a run shows them."""
    shown = [f"{name} {values[name]:.3f}" for name in ("loss", *SHOWN) if name in values]
    if values.keys() & set(SHOWN) == {"clip"}:  # the loss itself
        shown.pop()
    return "  ".join([*shown, f"{values['samples_per_second']:,.0f} samples/s"])


class CollapseDetector:
    """Detects a dead alignment: every row's hardest negative wins and every best set is the empty one."""

    def __init__(self) -> None:
        self._recent: deque[Tensor] = deque(maxlen=WINDOW)
        self._warned = False

    def add(self, parts: Mapping[str, Tensor]) -> None:
        """Remember the logged parts of a step, without a device sync."""
        if "violation" in parts and "empty" in parts:
            self._recent.append(torch.minimum(parts["violation"], parts["empty"]))

    def warning(self) -> str | None:
        """A warning, once, when both shares have stayed at 1 for `WINDOW` steps."""
        if self._warned or len(self._recent) < WINDOW or float(torch.stack(list(self._recent)).min()) < DEAD:
            return None
        self._warned = True
        return (
            f"the alignment loss looks dead: for {WINDOW} steps every hardest negative beat its positive and every "
            "best set of regions was empty. Try alignment.preset=default, or a smaller optim.lr"
        )
