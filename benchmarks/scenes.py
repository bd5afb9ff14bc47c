"""How many embedded scenes are drawn in a second: scenes and captions, trees and tokens, images, whole batches.

    OMP_NUM_THREADS=1 python benchmarks/scenes.py --workers 2 [--device cuda] [--output scenes.json]

Each part is timed alone on new scenes, in one process; the last rows are whole batches of the loader, made in turn and
by worker processes ahead. On a CPU the parts are in seconds of the process, so other jobs on the machine count less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from powerclip.data.batch import BatchSpec
from powerclip.data.scene_loader import SceneLoader
from powerclip.data.scenes import generate, pack_scenes, render_packed
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="pixels; the quickstart has 64")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    device, count = torch.device(given.device), given.batch * given.batches
    tokenizer = CaptionTokenizer()
    rates: dict[str, float] = {}

    def measure(name: str, work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
            clock = time.perf_counter
        started = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates[name] = count / (clock() - started)
        print(f"{name:32} {rates[name]:10,.0f} scenes/s", flush=True)

    [tokenizer.encode(generate(1, number).caption) for number in range(200)]  # fills the tokenizer's memory
    scenes: list = []
    measure("scenes", lambda: scenes.extend(generate(0, number) for number in range(count)))
    measure("captions and trees", lambda: [scene.tree for scene in scenes])
    encoded: list = []
    measure("tokens", lambda: encoded.extend(tokenizer.encode(scene.caption) for scene in scenes))
    measure("phrases", lambda: pack_phrases([scene.tree for scene in scenes], encoded, 77))
    packed: list = []
    parts = [scenes[start : start + given.batch] for start in range(0, count, given.batch)]
    measure("numbers", lambda: packed.extend(pack_scenes(part) for part in parts))
    render_packed(packed[0].to(device), given.size)
    measure("images", lambda: [render_packed(part.to(device), given.size) for part in packed])
    for workers in (0, given.workers):
        spec = BatchSpec(
            (given.size, given.size), (8, 8), given.batch, regions=20, seed=workers + 2, workers=workers, device=device
        )
        loader = SceneLoader(spec, tokenizer)
        name = "batches, one process" if workers == 0 else f"batches, {workers} worker processes"
        # Those of worker processes by the wall clock, which other jobs on the machine slow down.
        clock = time.perf_counter if workers else time.process_time
        measure(name, lambda loader=loader: [None for _ in loader.stream(0, given.batches)], clock)
    if given.output:
        content = {
            "machine": machine(),
            "device": str(device),
            "size": given.size,
            "batch": given.batch,
            "rates": rates,
        }
        write_atomic(given.output, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
