"""A long run with everything that goes wrong in one: bad samples, bad steps, a kill, a preemption. Nothing may be lost.

    python benchmarks/soak.py                    # 10,000 steps: as many as the quickstart's towers take in an hour
    python benchmarks/soak.py --tiny             # half a minute: shows that it works

Towers of one layer train on shards made here, three of every hundred samples damaged and one tar cut off; ten batches
are poisoned with NaN. After a third of the steps the process is killed (-9), after two thirds it gets SIGTERM; each
time the same command starts again. A second run, never stopped, is the reference. Then everything is counted: the
samples of every epoch, the updates left out, what was replayed after the kill, memory over time, the final weights.
Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, markdown, origin, run, write_result

from powerclip.data.batch import Batch
from powerclip.data.loader import BatchLoader
from powerclip.data.shards import open_shards
from powerclip.data.tar_index import load_index
from powerclip.runtime.signals import EXIT_PREEMPTED, Preempted
from powerclip.train import loop
from powerclip.train.metrics import read_metrics
from powerclip.train.recipe import Recipe, load_recipe
from powerclip.train.statistics import resident_bytes

# An hour's worth: the quickstart takes 114 s for 300 steps on two cores (README.md), 9,500 in an hour.
STEPS = 10_000
RECIPE = """
model:
  config:
    embed_dim: 16
    vision_cfg: {{image_size: 16, patch_size: 8, width: 16, layers: 1, head_width: 8}}
    text_cfg: {{context_length: 24, vocab_size: 49408, width: 8, heads: 1, layers: 1}}
objective: powerclip
regions: {{count: 3}}
data: {{source: shards, shards: "{shards}/*.tar", trees: flat, workers: 1, window: 4}}
optim: {{lr: 1e-3, warmup: 100}}
train:
  steps: {steps}
  batch_size: 16
  device: cpu
  log_every: {log_every}
  checkpoint_every: {checkpoint_every}
"""
POISON_EVERY = 10  # times in a run
COLOURS = ("red", "green", "blue", "white", "black", "yellow")


@dataclass(frozen=True)
class Session:
    """The part of a run from one start to the next."""

    first: int  # step
    last: int
    ended: str
    seconds: float
    quarter_mib: float  # resident memory of the process that trains, over the session's second quarter
    end_mib: float  # over its last quarter
    workers_mib: float  # the largest of those that prepare data

    @property
    def growth(self) -> float:
        return self.end_mib - self.quarter_mib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="240 steps on 200 samples")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--child", nargs=2, metavar=("RECIPE", "RUN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sys.exit(train_and_record(*map(Path, arguments.child)))
    if arguments.tiny:
        arguments.steps, arguments.samples = 240, 200
    with tempfile.TemporaryDirectory() as folder:
        soak(Path(folder), arguments)


def soak(folder: Path, arguments: argparse.Namespace) -> None:
    bad = write_shards(folder / "shards", arguments.samples)
    path = folder / "soak.yaml"
    steps = arguments.steps
    text = RECIPE.format(
        shards=folder / "shards", steps=steps, log_every=max(1, steps // 400), checkpoint_every=max(1, steps // 40)
    )
    path.write_text(text, encoding="utf-8")
    began = time.monotonic()
    run, reference = folder / "stopped", folder / "whole"
    sessions = [
        session(path, run, steps // 3 + 7, signal.SIGKILL),
        session(path, run, 2 * steps // 3 + 3, signal.SIGTERM),
        session(path, run, None, None),
    ]
    uninterrupted = session(path, reference, None, None)
    account = check(load_recipe(path), run, reference, folder / "shards", bad)
    report(sessions, uninterrupted, account, time.monotonic() - began, arguments)


# ---- the data --------------------------------------------------------------------------------------------------------


def write_shards(folder: Path, count: int, shards: int = 8) -> set[str]:
    """Tars of small images; gives the keys of the samples that cannot be used."""
    from PIL import Image

    folder.mkdir(parents=True)
    draw = random.Random(0)
    bad = set()
    for number in range(shards):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as tar:
            for sample in range(count // shards):
                key = f"{number:05d}{sample:05d}"
                colour = draw.choice(COLOURS)
                file = io.BytesIO()
                image = Image.new("RGB", (24 + draw.randrange(16), 24 + draw.randrange(16)), colour)
                image.save(file, "jpeg")
                data, caption = file.getvalue(), f"a {colour} image number {draw.randrange(1000)}".encode()
                fault = draw.random()
                if fault < 0.01:
                    data = data[: len(data) // 2]
                elif fault < 0.02:
                    data = bytes(draw.randrange(256) for _ in range(300))
                elif fault < 0.03:
                    caption = b"\x00\xff\xfe\x80" * 9
                if fault < 0.03:
                    bad.add(key)
                for suffix, content in (("jpg", data), ("txt", caption)):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    last = folder / f"{shards - 1:05d}.tar"
    last.write_bytes(last.read_bytes()[: last.stat().st_size * 2 // 3 + 5])  # cut off within a member
    return bad


# ---- the run, in separate processes ----------------------------------------------------------------------------------


class Recording(BatchLoader):
    """A loader that records the keys of every step, and poisons a few batches."""

    def __init__(self, loader: BatchLoader, path: Path, steps: int):
        super().__init__(loader.spec)
        self._loader, self._path, self._steps = loader, path, steps

    def batch(self, step: int) -> Batch:
        return self._loader.batch(step)

    def stream(self, start: int, stop: int) -> Iterator[Batch]:  # type: ignore[override]
        with open(self._path, "a", encoding="utf-8", buffering=1) as file:
            file.write("\n")  # ends a line that a kill has cut off
            stream = self._loader.stream(start, stop)
            try:
                for step, batch in zip(range(start, stop), stream, strict=True):
                    file.write(f"{step} {' '.join(batch.keys)}\n")
                    if step in poisoned(self._steps):
                        batch = replace(batch, images=torch.full_like(batch.images, float("nan")))
                    yield batch
            finally:
                stream.close()


def poisoned(steps: int) -> set[int]:
    every = max(2, steps // POISON_EVERY)
    return set(range(every // 2, steps, every))


def train_and_record(path: Path, run: Path) -> int:
    torch.set_num_threads(1)
    recipe = load_recipe(path)
    make_loader: Any = loop.make_loader

    def recording(*args: Any, **kwargs: Any) -> BatchLoader:
        return Recording(make_loader(*args, **kwargs), run.with_suffix(".keys"), recipe.train.steps)

    loop.make_loader = recording
    try:
        loop.train(recipe, run, resume="auto", quiet=True)
    except Preempted:
        return EXIT_PREEMPTED
    return 0


def session(path: Path, run: Path, until: int | None, number: signal.Signals | None) -> Session:
    """Train until a step is reached, then send a signal; without one, to the end."""
    began, first = time.monotonic(), last_step(run)
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", str(path), str(run)], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    workers = 0
    try:
        while process.poll() is None:
            workers = max([workers, *(resident_bytes(child) or 0 for child in children(process.pid))])
            if until is not None and number is not None and last_step(run) >= until:
                process.send_signal(number)
                process.wait(60)
            time.sleep(0.2)
    finally:
        process.kill()
    expected = {None: 0, signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: EXIT_PREEMPTED}[number]
    if process.returncode != expected:
        raise SystemExit(f"the run ended with {process.returncode}, not {expected}")
    last = last_step(run)
    rows = [row for row in read_metrics(run / "metrics.jsonl") if first < row["step"] <= last]
    quarter = len(rows) // 4
    mib = [1024 * row["host_gib"] for row in rows]
    ended = {None: "finished", signal.SIGKILL: "kill -9", signal.SIGTERM: f"SIGTERM, exit {EXIT_PREEMPTED}"}[number]
    print(f"steps {first} to {last}: {ended}", flush=True)
    return Session(
        first=first,
        last=last,
        ended=ended,
        seconds=time.monotonic() - began,
        quarter_mib=statistics.median(mib[quarter : 2 * quarter] or mib),
        end_mib=statistics.median(mib[-quarter:] or mib),
        workers_mib=workers / 2**20,
    )


def last_step(run: Path) -> int:
    """The last step that was logged."""
    return max((int(row["step"]) for row in read_metrics(run / "metrics.jsonl")), default=0)


def children(process: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


# ---- the account -----------------------------------------------------------------------------------------------------


def check(recipe: Recipe, run: Path, reference: Path, shards: Path, bad: set[str]) -> dict[str, Any]:
    """Count everything; SystemExit for what does not add up."""
    paths = sorted(shards.glob("*.tar"))
    opened = open_shards(paths)
    indexed = {key for path in paths for key in load_index(path).keys}
    good, unusable = indexed - bad, len(indexed & bad)
    steps, replayed = read_keys(run.with_suffix(".keys"))
    size = recipe.train.batch_size
    demand(sorted(steps) == list(range(recipe.train.steps)), "every step was recorded")
    stream = [key for step in range(recipe.train.steps) for key in steps[step]]
    demand(len(stream) == size * recipe.train.steps, "every batch was full")
    demand(not bad & set(stream), "no bad sample was shown")
    epochs = len(stream) // opened.samples
    for epoch in range(epochs):
        shown = stream[epoch * opened.samples : (epoch + 1) * opened.samples]
        demand(set(shown) == good, f"epoch {epoch} showed every good sample")
        demand(len(shown) - len(set(shown)) == unusable, f"epoch {epoch} had one stand-in for each bad sample")
    rows = list(read_metrics(run / "metrics.jsonl"))
    counted = int(sum(value for row in rows for name, value in row.items() if name.startswith("bad/")))
    reference_steps, _ = read_keys(reference.with_suffix(".keys"))
    demand(reference_steps == steps, "the run that was stopped saw what the other saw")
    skipped = int(rows[-1]["skipped"])
    demand(skipped == len(poisoned(recipe.train.steps)), "every poisoned update was left out, and no other")
    demand(same_model(run, reference), "the weights are bit-equal")
    return {
        "samples": opened.samples,
        "unusable": unusable,
        "damaged_shards": {what: len(which) for what, which in opened.damage.items()},
        "epochs": epochs,
        "shown": len(stream),
        "bad_counted_in_the_log": counted,
        "replayed_steps": replayed,
        "poisoned": skipped,
    }


def read_keys(path: Path) -> tuple[dict[int, tuple[str, ...]], int]:
    """Step → keys, and how many steps were done twice; SystemExit when the second time was not like the first."""
    steps: dict[int, tuple[str, ...]] = {}
    replayed, lines = 0, path.read_text(encoding="utf-8").split("\n")
    width = max(len(line.split()) for line in lines)
    for line in lines:
        step, *keys = line.split() or [""]
        if len(keys) + 1 < width:  # empty, or cut off by the kill
            continue
        if int(step) in steps:
            replayed += 1
            demand(steps[int(step)] == tuple(keys), f"step {step} was replayed as it was")
        steps[int(step)] = tuple(keys)
    return steps, replayed


def same_model(one: Path, other: Path) -> bool:
    from safetensors.torch import load_file

    a, b = (load_file(run / "model" / "open_clip_model.safetensors") for run in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def demand(holds: bool, claim: str) -> None:
    if not holds:
        raise SystemExit(f"it does not hold that {claim}")


def report(
    sessions: list[Session], reference: Session, account: dict[str, Any], seconds: float, arguments: argparse.Namespace
) -> None:
    rows = [
        [
            name,
            f"{part.first:,} … {part.last:,}",
            part.ended,
            f"{part.seconds:.0f}",
            f"{part.quarter_mib:.1f}",
            f"{part.end_mib:.1f}",
            f"{part.growth:+.1f} ({part.growth / part.quarter_mib:+.2%})",
            f"{part.workers_mib:.0f}",
        ]
        for name, part in [
            *((f"stopped, {number}", part) for number, part in enumerate(sessions, 1)),
            ("whole", reference),
        ]
    ]
    heads = ("run", "steps", "ended by", "s", "MiB, 2nd quarter", "MiB, last quarter", "growth", "MiB of a worker")
    torn = sum(account["damaged_shards"].values())
    facts = [
        "# Soak",
        "",
        f"{arguments.steps:,} steps of 16 pairs, {account['shown']:,} samples: {account['epochs']} whole epochs of "
        f"{account['samples']:,}, {account['unusable']} of them unusable, {torn} shard cut off; {account['poisoned']} "
        f"batches poisoned with NaN. {seconds / 60:.1f} minutes in all.",
        "",
        "Checked, and it held: every epoch showed every good sample and no bad one, with one stand-in for each; "
        f"{account['replayed_steps']} steps that the kill had undone were replayed with the same samples; all "
        f"{account['poisoned']} poisoned updates were left out and no other; the weights in the end are bit-equal to "
        "those of the run that was never stopped.",
        "",
        markdown(rows, heads),
    ]
    provenance = origin()
    data = {
        "steps": arguments.steps,
        "seconds": seconds,
        "account": account,
        "sessions": [asdict(part) for part in sessions],
        "reference": asdict(reference),
    }
    text = "\n".join(facts)
    path = write_result(arguments.output, "soak-tiny" if arguments.tiny else "soak", provenance, data, text)
    print(f"{text}\n\n{path}.json, .md")


if __name__ == "__main__":
    run(main)
