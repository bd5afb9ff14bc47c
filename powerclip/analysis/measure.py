"""How a time and a peak of memory are taken. Times are medians; the spread is half the range between the quartiles.

On a CPU with one thread it is the time that the process itself computes, so that others on the machine do not count;
with several threads it is the time on the clock.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Measurement:
    """Of one thing that was run several times."""

    ms: float
    spread: float  # ms
    gib: float | None  # peak above what was allocated before; None where it is not known (CPU)


def measure(
    function: Callable[[], object], device: torch.device, repeats: int, warmup: int, count_tensors: bool = False
) -> Measurement:
    """Run `function` a few times unmeasured, then `repeats` times measured.

    `count_tensors` gives `gib` on a CPU too, from the sizes of the tensors: one more, slower run.
    """
    gpu = device.type == "cuda"
    for _ in range(warmup):
        function()
    gib = None
    if gpu:
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        gib = (torch.cuda.max_memory_allocated(device) - before) / 2**30
    elif count_tensors:
        with PeakOfTensors() as counted:
            function()
        gib = counted.peak / 2**30
    times = [_gpu_ms(function) if gpu else _cpu_ms(function) for _ in range(repeats)]
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return Measurement(statistics.median(times), (quarters[2] - quarters[0]) / 2, gib)


class PeakOfTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make while it is on, for as long as they live.

    The same on every run and every machine, unlike a process's memory; what an operation needs only inside is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0  # bytes
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._note(value)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:  # a view, or changed in place
            return

        def gone(_: Any) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _gpu_ms(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _cpu_ms(function: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return 1000 * (clock() - start)
