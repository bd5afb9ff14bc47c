"""Images a second of training with its data, beside the step alone on batches that lie on the device already.

    POWERCLIP_DATA=DATA python benchmarks/throughput.py recipes/captions10k/powerclip.yaml      # on a GPU, a minute
    POWERCLIP_DATA=DATA python benchmarks/throughput.py recipes/captions10k/powerclip.yaml data.source=shards \\
        data.trees=null data.sidecars=SIDECARS
    python benchmarks/throughput.py --tiny                      # on a CPU, in seconds: shows that it works

Both take turns, so that a clock that slows down slows both, and both do what `powerclip train` does in a step. With its
data a step reads, decodes, crops, draws boxes, packs trees and copies; the step alone cycles through a few batches of
the run, so that captions are as long as in the run. The ratio of the two is the share of the GPU's time that the
input leaves. A third turn takes batches and trains nothing: the rate of the input alone. Writes a JSON file and a
Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import torch
from measure import RESULTS, markdown, origin, run, write_result

from powerclip.data.batch import Batch
from powerclip.data.loader import killed_workers
from powerclip.train.data import make_loader
from powerclip.train.loop import train_step, with_steps
from powerclip.train.recipe import Recipe, load_recipe
from powerclip.train.state import TrainState, start
from powerclip.train.towers import is_compiled

KEPT = 8  # batches that the step alone cycles through
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", help="a recipe file")
    parser.add_argument("settings", nargs="*", help="settings to change, as data.workers=8")
    parser.add_argument("--tiny", action="store_true", help="the quickstart's recipe, 16 pairs, few steps")
    parser.add_argument("--steps", type=int, default=100, help="steps of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=60, help="steps before the first turn; they compile")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_intermixed_args()
    if arguments.tiny:
        arguments.recipe, arguments.settings = (
            ROOT / "recipes" / "quickstart" / "powerclip.yaml",
            ["train.batch_size=16"],
        )
        arguments.steps, arguments.rounds, arguments.warmup = 2, 2, KEPT
    if arguments.recipe is None:
        parser.error("name a recipe, or --tiny")
    if min(arguments.warmup, arguments.steps, arguments.rounds) < 1:
        parser.error("--warmup, --steps and --rounds are at least 1")
    recipe = load_recipe(arguments.recipe, arguments.settings)
    with killed_workers():
        rates = measure(recipe, arguments)
    report(recipe, rates, arguments)


def measure(recipe: Recipe, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Images a second of every round: training with its data, without them, and the data without training."""
    state = start(recipe)
    loader = make_loader(recipe, state.encoder, device=state.device, compiled=is_compiled(recipe.train, state.device))
    recipe = with_steps(recipe, loader)
    needed = arguments.warmup + 2 * arguments.rounds * arguments.steps
    rates: dict[str, list[float]] = {"with its data": [], "the step alone": [], "the data alone": []}
    kept: list[Batch] = []
    with closing(loader.stream(0, needed)) as stream:
        for batch in itertools.islice(stream, arguments.warmup):
            kept = [*kept, batch.to(state.device)][-KEPT:]
            train_step(state, kept[-1], recipe)
        for _ in range(arguments.rounds):
            batches = itertools.islice(itertools.cycle(kept), arguments.steps)
            rates["the step alone"].append(rate(state, batches, recipe))
            rates["with its data"].append(rate(state, moved(stream, arguments.steps, state.device), recipe))
            rates["the data alone"].append(rate(state, moved(stream, arguments.steps, state.device)))
            print({name: round(values[-1]) for name, values in rates.items()}, flush=True)
    return rates


def moved(stream: Iterator[Batch], count: int, device: torch.device) -> Iterator[Batch]:
    """The stream's next batches, on the device."""
    for batch in itertools.islice(stream, count):
        yield batch.to(device, non_blocking=True)


def rate(state: TrainState, batches: Iterable[Batch], recipe: Recipe | None = None) -> float:
    """Images a second of a step on each of the batches; without a recipe, of the batches alone."""
    wait(state.device)
    began, images = time.perf_counter(), 0
    for batch in batches:
        if recipe is not None:
            train_step(state, batch, recipe)
        images += len(batch)
    wait(state.device)
    return images / (time.perf_counter() - began)


def wait(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(recipe: Recipe, rates: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    provenance = origin()
    shares = [a / b for a, b in zip(rates["with its data"], rates["the step alone"], strict=True)]
    rows = [
        [name, f"{statistics.median(values):.0f}", f"{min(values):.0f} … {max(values):.0f}"]
        for name, values in rates.items()
    ]
    share = f"{statistics.median(shares):.1%} ({min(shares):.1%} … {max(shares):.1%})"
    about = (
        f"{arguments.recipe.name}, {recipe.objective}, batch {recipe.train.batch_size}, data from {recipe.data.source}"
    )
    text = f"# Training with its data\n\n{about}; {arguments.rounds} turns of {arguments.steps} steps\n\n"
    text += markdown(rows, ["", "images/s", "range"]) + f"\n\nWith its data, of the step alone: {share}"
    name = "tiny" if arguments.tiny else f"{arguments.recipe.stem}-{recipe.data.source}"
    path = write_result(arguments.output, f"throughput-{name}", provenance, {"about": about, "rounds": rates}, text)
    print(f"{text}\n\n{path}.json, .md")


if __name__ == "__main__":
    run(main)
