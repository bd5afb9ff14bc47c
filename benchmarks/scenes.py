"""How many embedded scenes are drawn in a second: scenes, captions, numbers, images, whole batches.

    OMP_NUM_THREADS=1 python benchmarks/scenes.py --workers 2 [--collective 0.5] [--device cuda] [--output scenes.json]

Each part is timed alone on new scenes, in one process; the last rows are whole batches of the loader, made in turn and
by worker processes ahead. On a CPU the parts are in seconds of the process, so other jobs on the machine count less.
The batches of worker processes are timed by the clock, when all processes have begun, and so many that what they had
made before hardly counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch

from powerclip.data.batch import BatchSpec
from powerclip.data.scene_captions import SceneCaptions
from powerclip.data.scene_loader import SceneLoader
from powerclip.data.scenes import generate, pack_scenes, render_packed
from powerclip.data.tokens import CaptionTokenizer
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="pixels; the quickstart has 64")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--streamed", type=int, default=20, help="batches of each worker process")
    parser.add_argument("--collective", type=float, default=0.0, help="share with phrases for several objects")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    device, count = torch.device(given.device), given.batch * given.batches
    tokenizer = CaptionTokenizer()
    rates: dict[str, float] = {}

    def measure(
        name: str, work: Callable[[], object], clock: Callable[[], float] = time.process_time, scenes: int = count
    ) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
            clock = time.perf_counter
        started = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates[name] = scenes / (clock() - started)
        print(f"{name:32} {rates[name]:10,.0f} scenes/s", flush=True)

    def split(number: int) -> str:
        return "collective" if number % 100 < 100 * given.collective else "train"

    captions = SceneCaptions(tokenizer)
    captions.pack([generate(1, number, kind) for number in range(200) for kind in ("train", "collective")])  # all words
    scenes: list = []
    measure("scenes", lambda: scenes.extend(generate(0, number, split(number)) for number in range(count)))
    parts = [scenes[start : start + given.batch] for start in range(0, count, given.batch)]
    measure("captions: tokens and phrases", lambda: [captions.pack(part) for part in parts])
    packed: list = []
    measure("numbers", lambda: packed.extend(pack_scenes(part) for part in parts))
    render_packed(packed[0].to(device), given.size)
    measure("images", lambda: [render_packed(part.to(device), given.size) for part in packed])

    spec = BatchSpec(
        (given.size, given.size), (8, 8), given.batch, regions=20, seed=2, workers=given.workers, device=device
    )
    loader = SceneLoader(spec, tokenizer, collective=given.collective)
    measure("batches, one process", lambda: [loader.batch(step) for step in range(given.batches)])
    warm_up, timed = 2 * given.workers, given.streamed * max(1, given.workers)
    batches = loader.stream(0, warm_up + timed)
    list(islice(batches, warm_up))
    name = f"batches, {given.workers} worker processes"
    measure(name, lambda: list(map(len, batches)), time.perf_counter, timed * given.batch)
    if given.output:
        content = {
            "machine": machine(),
            "device": str(device),
            "size": given.size,
            "batch": given.batch,
            "collective": given.collective,
            "rates": rates,
        }
        write_atomic(given.output, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
