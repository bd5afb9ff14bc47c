"""Step time of every method relative to CLIP's, in one run.

    python benchmarks/methods.py                # on a GPU: ViT-B/16, batch 512, bf16, compiled block by block
    python benchmarks/methods.py --compile auto --only flip powerclip    # as training compiles: a minute more a method
    python benchmarks/methods.py --trees DATA/captions10k/trees.tsv.gz   # captions of images, not of scenes
    python benchmarks/methods.py --tiny         # seconds on a CPU: shows that it works, measures nothing

A step is what training does: towers, loss, gradient, AdamW and what the method does after it; the batch lies on the
device already. Methods take turns, so that a clock that slows down slows all of them: CLIP and a method as soon as that
is compiled, then all of them in rounds. Writes a JSON file and a Markdown table, beside what the paper's Table 13 says
of an epoch; anew after every turn of all, so that a run that is ended leaves what it measured. A method that fails or
does not fit is a row that says so.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from alignment import failure
from measure import RESULTS, Measurement, markdown, measure, origin, run, write_result
from step import make_batch

from powerclip.data.batch import Batch
from powerclip.objectives import OBJECTIVES
from powerclip.train.data import make_loader
from powerclip.train.loop import train_step
from powerclip.train.recipe import Recipe, parse_recipe
from powerclip.train.state import TrainState, start

# Appendix E, Table 13: an epoch's time relative to CLIP's.
PAPER = {"clip": 1.0, "sparc": 1.26, "filip": 1.41, "powerclip": 1.72}
TARGET = {"flip": 0.6, "e_clip": 0.85, "clip_pgs": 0.85, "sparc": 1.05, "filip": 1.10}
# A warm-up that is never left: the weights hardly move, and FLIP's tuning is far away.
RECIPE = """
model: {model}
objective: {objective}
objective_settings: {settings}
optim: {{lr: 1e-3, warmup: 1000000}}
train: {{steps: 2000000, batch_size: {batch}, device: {device}, compile: {compile}}}
"""
LARGE = "{name: ViT-B-16}"
TINY = (
    "{config: {embed_dim: 16, vision_cfg: {image_size: 32, patch_size: 8, width: 32, layers: 1, head_width: 16}, "
    "text_cfg: {context_length: 40, vocab_size: 49408, width: 16, heads: 1, layers: 1}}}"
)


@dataclass(frozen=True)
class Method:
    """A method with its towers, and the times that were taken of it."""

    state: TrainState
    recipe: Recipe
    times: list[Measurement] = field(default_factory=list)

    @classmethod
    def of(cls, recipe: Recipe) -> Method:
        """At its first step. The recipe's warm-up should be endless, so that the weights hardly move."""
        return cls(start(recipe), recipe)

    def step(self, batch: Batch) -> None:
        """Towers, loss, gradient, AdamW and what the method does after it."""
        train_step(self.state, batch, self.recipe)


def take_turns(
    methods: Mapping[str, Method],
    batch: Batch,
    rounds: int,
    repeats: int,
    report: Callable[[str, Measurement], object] = lambda name, time: None,
) -> None:
    """Time the methods, `repeats` steps of each in every round: a clock that slows down slows all of them."""
    for _ in range(rounds):
        for name, method in methods.items():
            method.times.append(measure(partial(method.step, batch), method.state.device, repeats, warmup=2))
            report(name, method.times[-1])


def beside_clip(methods: Mapping[str, Method]) -> list[dict[str, Any]]:
    """A row for each method; each round is compared with CLIP's of the same round."""
    rows = []
    for name, method in methods.items():
        ratios = [measured.ms / clip.ms for measured, clip in zip(method.times, methods["clip"].times, strict=True)]
        rows.append(
            {
                "method": name,
                "ms": statistics.median(measured.ms for measured in method.times),
                "relative": statistics.median(ratios),
                "smallest": min(ratios),
                "largest": max(ratios),
                "gib": method.times[-1].gib,
                "paper": PAPER.get(name),
            }
        )
    return rows


@dataclass
class Entry:
    """A method of the comparison."""

    method: Method | None = None  # None: not built
    clips: list[Measurement] = field(default_factory=list)  # CLIP's of the same turns
    gib: float | None = None  # peak on a GPU, with weights and optimiser state
    note: str = ""  # why it takes no turns, or no more

    @property
    def times(self) -> list[Measurement]:
        return self.method.times if self.method else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, two repetitions, not compiled")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--trees", type=Path, help="TSV file of bracketed trees, one caption each")
    parser.add_argument("--compile", default="blocks", help="auto, always, blocks or never")
    parser.add_argument("--rounds", type=int, default=2, help="turns of all, after each method's first beside CLIP")
    parser.add_argument("--repeats", type=int, default=6, help="steps of a method in each turn")
    parser.add_argument("--only", nargs="*", choices=OBJECTIVES, default=OBJECTIVES, help="methods beside clip")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin to compile no method later than this")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.batch, arguments.rounds, arguments.repeats, arguments.compile = 8, 2, 2, "never"
    # Ended by a time limit it writes what it has, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    comparison = Comparison(arguments)
    try:
        comparison.run(dict.fromkeys(["clip", *arguments.only]))
    finally:
        print(f"\n{comparison.write()}")


class Comparison:
    """The methods, their times so far, and why some have none."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.entries: dict[str, Entry] = {}
        self.batch: Batch | None = None
        self._origin = origin()

    def run(self, names: dict[str, None]) -> None:
        began = time.monotonic()
        for name in names:
            self.entries[name] = Entry(note="left out: ended before")
        for name in names:
            if time.monotonic() - began > self.arguments.seconds:
                self.entries[name].note = f"left out: {self.arguments.seconds:g} s were over"
                continue
            self.prepare(name)
            self.take_turn(dict.fromkeys(["clip", name]))
        for _ in range(self.arguments.rounds):
            self.take_turn(names)

    def prepare(self, name: str) -> None:
        """Build and compile a method."""
        entry, began = self.entries[name], time.perf_counter()
        try:
            entry.method, entry.gib = self._ready(name)
            entry.note = ""
        except Exception as problem:
            entry.note = failure(problem)
        self._release(entry)
        print(f"{name:10} {entry.note or f'ready after {time.perf_counter() - began:.0f} s'}", flush=True)

    def _ready(self, name: str) -> tuple[Method, float | None]:
        """The method, compiled, and its peak memory."""
        on_gpu = torch.device(self.arguments.device).type == "cuda"
        before = torch.cuda.memory_allocated() if on_gpu else 0  # by the other methods
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        method = make_method(name, self.arguments)
        if self.batch is None:  # the first method makes it; all methods get the same
            self.batch = self._make_batch(method).to(method.state.device)
        method.step(self.batch)
        # Of the step that compiles: what a replayed graph takes is not counted by torch.
        gib = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else None
        method.step(self.batch)  # finds out whether compiling once was enough
        return method, gib

    def _make_batch(self, method: Method) -> Batch:
        recipe, trees = method.recipe, self.arguments.trees
        if trees is not None:
            return make_batch(recipe.model, self.arguments.batch, recipe.regions.count, trees)
        loader = make_loader(recipe, method.state.encoder, compiled=self.arguments.compile != "never")
        return loader.batch(0)

    def take_turn(self, names: dict[str, None]) -> None:
        """Time some steps of each method that has not failed; then write the results so far."""
        clip = None  # CLIP's time of this turn
        for name in names:
            entry = self.entries[name]
            if entry.note or entry.method is None or self.batch is None:
                continue
            try:
                take_turns({name: entry.method}, self.batch, 1, self.arguments.repeats)
            except Exception as problem:
                entry.note = failure(problem)
                self._release(entry)
                print(f"{name:10} {entry.note}", flush=True)
                continue
            clip = entry.times[-1] if name == "clip" else clip
            if clip is not None:
                entry.clips.append(clip)
            print(f"{name:10} {entry.times[-1].ms:9.2f} ms", flush=True)
        self.write()

    def _release(self, entry: Entry) -> None:
        """Give back memory that the next method may need in pieces of other sizes."""
        if entry.note and entry.method is not None:
            entry.method.state.optimizer.zero_grad(set_to_none=True)
        if torch.device(self.arguments.device).type == "cuda":
            torch.cuda.empty_cache()

    def rows(self) -> list[dict[str, Any]]:
        clip = self.entries["clip"].method
        rows = []
        for name, entry in self.entries.items():
            row: dict[str, Any] = {"method": name, "ms": None, "relative": None, "smallest": None, "largest": None}
            row |= {"paper": None, "turns": len(entry.times)}
            if entry.method and clip and entry.clips:
                # CLIP may have failed in a later turn.
                method = replace(entry.method, times=entry.times[: len(entry.clips)])
                row |= beside_clip({"clip": replace(clip, times=entry.clips), name: method})[-1]
            elif entry.times:
                row["ms"] = statistics.median(measured.ms for measured in entry.times)
            rows.append({**row, "gib": entry.gib, "target": TARGET.get(name), "note": entry.note})
        return rows

    def write(self) -> str:
        """Write the results so far; return the table."""
        arguments, data = self.arguments, self.rows()
        model = "a tiny model: the times mean nothing" if arguments.tiny else "ViT-B/16"
        about = f"{model}, batch {arguments.batch}, compile: {arguments.compile}"
        if self.batch is not None:
            about += f", captions padded to {self.batch.padded_length:.1f} tokens, at most {self.batch.tokens.shape[1]}"
        text = f"# Step time of every method\n\n{about}\n\n{markdown([cells(row) for row in data], HEADS)}"
        name = "methods-tiny" if arguments.tiny else f"methods-{arguments.device.split(':')[0]}"
        path = write_result(arguments.output, name, self._origin, {"about": about, "rows": data}, text)
        return f"{text}\n\n{path}.md"


def make_method(name: str, arguments: argparse.Namespace) -> Method:
    settings = "{hidden: 32, output: 16}" if arguments.tiny and name == "a_clip" else "{}"
    text = RECIPE.format(
        model=TINY if arguments.tiny else LARGE,
        objective=name,
        settings=settings,
        batch=arguments.batch,
        device=arguments.device,
        compile=arguments.compile,
    )
    return Method.of(parse_recipe(text, "benchmarks/methods.py"))


HEADS = ["method", "ms a step", "× CLIP (of the turns)", "GiB", "paper, × CLIP an epoch", "target", "note"]


def cells(row: dict[str, Any]) -> list[object]:
    relative = "–"
    if row["relative"] is not None:
        relative = f"{row['relative']:.3f} ({row['smallest']:.3f} … {row['largest']:.3f})"
    return [
        row["method"],
        "–" if row["ms"] is None else f"{row['ms']:.1f}",
        relative,
        "–" if row["gib"] is None else f"{row['gib']:.1f}",
        row["paper"] or "–",
        row["target"] or "–",
        row["note"],
    ]


if __name__ == "__main__":
    run(main)
