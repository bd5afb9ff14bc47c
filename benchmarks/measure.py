"""What the speed benchmarks share: how a time and a peak of memory are taken, and what a result says about its origin.

Times are medians; the spread beside them is half the range between the quartiles.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from powerclip.analysis.machine import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Measurement:
    ms: float
    spread: float  # ms
    peak_gib: float | None  # None where it is not known (CPU)
    gib: float | None  # the same above what was allocated before


def measure(function: Callable[[], object], device: torch.device, repeats: int, warmup: int) -> Measurement:
    """Run `function` a few times unmeasured, then `repeats` times measured."""
    gpu = device.type == "cuda"
    for _ in range(warmup):
        function()
    peak = gib = None
    if gpu:
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        gib = peak - before / 2**30
    times = [_gpu_ms(function) if gpu else _cpu_ms(function) for _ in range(repeats)]
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return Measurement(statistics.median(times), (quarters[2] - quarters[0]) / 2, peak, gib)


def _gpu_ms(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _cpu_ms(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


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
        "command": " ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def markdown(rows: Sequence[Sequence[object]], heads: Sequence[str]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def write_result(folder: Path, name: str, made: dict[str, str], data: dict[str, Any], text: str) -> Path:
    """`<date>-<name>.json` with everything and `.md` to read; gives the path without its ending, for a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{made['date']}-{name}"
    path.with_suffix(".json").write_text(json.dumps({"origin": made, **data}, indent=1) + "\n")
    facts = "\n".join(f"- {key}: {value}" for key, value in made.items())
    path.with_suffix(".md").write_text(f"{text}\n\n{facts}\n")
    return path
