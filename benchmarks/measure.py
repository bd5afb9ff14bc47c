"""What the benchmarks share: taking time and memory, and writing a result with its origin.

Times are medians; the spread is half the range between the quartiles. On a CPU with one thread it is the process's own
time, so that other processes do not count; with several threads it is the time on the clock.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from powerclip.errors import UserError
from powerclip.report.table import Table
from powerclip.runtime.environment import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def run(main: Callable[[], None]) -> None:
    """Run a benchmark. What the user got wrong is one line and exit code 2, as with `powerclip`."""
    try:
        main()
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def origin() -> dict[str, str]:
    """When, where and from what a result was made."""
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "triton", "open_clip_torch")
        if any(importlib.metadata.distributions(name=name))
    }
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _git("describe", "--always", "--dirty", "--exclude=*"),
        "machine": machine(),
        **versions,
        "cuda": torch.version.cuda or "none",
        "command": " ".join(["python", Path(sys.argv[0]).name, *map(_named, sys.argv[1:])]),
    }


def _named(argument: str) -> str:
    """An argument without the folders of the machine that it was typed on."""
    return f"…/{Path(argument).name}" if Path(argument).is_absolute() else argument


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def markdown(rows: Sequence[Sequence[object]], heads: Sequence[str]) -> str:
    """The rows as a Markdown table."""
    return Table.plain(heads, rows).markdown()


def write_result(folder: Path, name: str, provenance: dict[str, str], data: dict[str, Any], text: str) -> Path:
    """`<date>-<name>.json` with everything and `.md` to read; gives the path without its ending, for a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{provenance['date']}-{name}"
    path.with_suffix(".json").write_text(json.dumps({"origin": provenance, **data}, indent=1) + "\n")
    facts = "\n".join(f"- {key}: {value}" for key, value in provenance.items())
    path.with_suffix(".md").write_text(f"{text}\n\n{facts}\n")
    return path


@dataclass(frozen=True)
class Measurement:
    """Time and memory of something that ran several times."""

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

    The same on every run and machine, unlike a process's memory; temporary memory inside an operation is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0  # bytes
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:  # a view, or changed in place
            return

        def released(_: Any) -> None:
            self.live -= size
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, released)
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
