"""Where the time of a training step goes: the copy to the device, towers, loss, backward pass, gradient norm, AdamW.

    python benchmarks/step_parts.py --trees DATA/captions10k/trees.tsv.gz    # on a GPU: ViT-B/16, 512 pairs, 2 minutes
    python benchmarks/step_parts.py --tiny                                   # on a CPU, in seconds: shows that it works

Each part is timed by itself, the device waited for before and after, so the parts add up to a little more than a step
that runs through. The whole step is one on a batch that lies on the device already: without the copy. Writes a JSON
file and a Markdown table; `benchmarks/scaling.py` reads the JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, markdown, origin, run, write_result
from step import TINY, make_batch

from powerclip.data.batch import Batch
from powerclip.train.guard import mark_loss, step_if_finite
from powerclip.train.loop import train_step
from powerclip.train.parallel import clip_gradients
from powerclip.train.recipe import Recipe
from powerclip.train.sections import ModelSection, RegionsSection, TrainSection
from powerclip.train.state import TrainState, start

PARTS = ("copy", "towers", "loss", "backward", "norm", "optimiser")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="towers of two layers, 16 pairs, three repetitions")
    parser.add_argument("--model", default="ViT-B-16", help="an open_clip model")
    parser.add_argument("--batch", type=int, default=512, help="pairs")
    parser.add_argument("--trees", type=Path, help="TSV file of bracketed trees, one caption each")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    pairs, repeats = (16, 3) if arguments.tiny else (arguments.batch, arguments.repeats)
    model = ModelSection(config=TINY) if arguments.tiny else ModelSection(name=arguments.model)
    train = TrainSection(batch_size=pairs, device="cuda" if torch.cuda.is_available() else "cpu")
    batch = make_batch(model, pairs, 4 if arguments.tiny else 10, arguments.trees)
    if train.device == "cuda":
        batch = replace(batch, images=batch.images.pin_memory())
    results = {}
    for objective in ("clip", "powerclip"):
        recipe = Recipe(
            model=model, objective=objective, regions=RegionsSection(count=batch.regions.shape[1]), train=train
        )
        results[objective] = measure_parts(recipe, batch, repeats)
        print(objective, {name: round(ms, 2) for name, ms in results[objective].items()}, flush=True)
    report(results, batch, arguments, "step-parts-tiny" if arguments.tiny else f"step-parts-{train.device}")


def measure_parts(recipe: Recipe, batch: Batch, repeats: int) -> dict[str, float]:
    """Part → median milliseconds; `step` is a whole one, as training runs it."""
    state = start(recipe)
    for _ in range(4):
        train_step(state, batch.to(state.device), recipe)
    rounds = [timed_parts(state, batch) for _ in range(repeats)]
    results = {name: statistics.median(times[name] for times in rounds) for name in PARTS}
    on_device = batch.to(state.device)
    wait = waiter(state)
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        train_step(state, on_device, recipe)
    wait()
    results["step"] = 1000 * (time.perf_counter() - began) / repeats
    results["parameters"] = sum(p.numel() for group in state.optimizer.param_groups for p in group["params"])
    return results


def timed_parts(state: TrainState, batch: Batch) -> dict[str, float]:
    wait, times = waiter(state), {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        wait()
        began = time.perf_counter()
        result = action()
        wait()
        times[name] = 1000 * (time.perf_counter() - began)
        return result

    on_device = timed("copy", lambda: batch.to(state.device, non_blocking=True))
    state.optimizer.zero_grad(set_to_none=True)
    plan = state.unwrapped_towers.plan(on_device.images)
    features = timed("towers", lambda: state.towers(on_device.images, on_device.token_groups, plan))
    terms = timed("loss", lambda: state.objective.loss(features, on_device))
    timed("backward", lambda: mark_loss(terms.total).backward())
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    norm = timed("norm", lambda: clip_gradients(parameters, None))
    timed("optimiser", lambda: step_if_finite(state.optimizer, norm))
    return times


def waiter(state: TrainState) -> Callable[[], None]:
    return torch.cuda.synchronize if state.device.type == "cuda" else lambda: None


def report(results: dict[str, dict[str, float]], batch: Batch, arguments: argparse.Namespace, name: str) -> None:
    nodes = len(batch.phrases.node_start) / len(batch)
    facts = {"pairs": len(batch), "M": batch.regions.shape[1], "mean K": round(nodes, 2), "L": batch.tokens.shape[1]}
    rows = [
        [objective, *(f"{times[part]:.2f}" for part in PARTS), f"{times['step']:.2f}"]
        for objective, times in results.items()
    ]
    text = "# Parts of a training step, ms\n\n" + ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n\n"
    text += markdown(rows, ("objective", *PARTS, "a whole step"))
    model = "tiny" if arguments.tiny else arguments.model
    data = {"batch": facts, "model": model, "parts": results}
    path = write_result(arguments.output, name, origin(), data, text)
    print(f"{text}\n\n{path}.json, .md")


if __name__ == "__main__":
    run(main)
