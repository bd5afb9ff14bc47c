"""One training step of open_clip's CLIP, our CLIP and PowerCLIP in several settings: same towers, data and batch.

    python benchmarks/step.py --trees DATA/captions10k/trees.tsv.gz     # on a GPU: ViT-B/16, 512 × 4,096 pairs
    python benchmarks/step.py --tiny                                    # on a CPU, in seconds: shows that it works
    OMP_NUM_THREADS=1 python benchmarks/step.py --towers recipes/quickstart/powerclip.yaml --batch 128 --regions 8 \\
        --ranks 1 --only "our CLIP" --only ", all" --rounds 5 --repeats 1    # on a CPU: the quickstart's step

Ours is the step of one rank of eight: 512 images against the 4,096 captions that it would have gathered. The other
ranks are simulated: they hold the same pairs, everything is computed and nothing is sent. open_clip's step is its
own model and its own ClipLoss at its own 77 tokens, 512 × 512 pairs; ours encode captions at their length. All use the
same precision, compilation and optimiser. Captions and trees are real ones when a file of trees is given, else those of
the embedded scenes; images are noise, which costs the same.

Steps are timed in rounds, one of each kind in turn, so that a GPU that warms up slows all of them; the table has the
median of the rounds and the towers' model FLOPs utilisation (MFU). Writes a JSON file and a Markdown table, anew after
every round, so that a run that is ended leaves what it measured.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from measure import RESULTS, markdown, measure, origin, run, write_result
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.regions import random_boxes
from powerclip.data.batch import Batch, shorter_captions
from powerclip.data.corpus import read_tree_file
from powerclip.data.scenes import generate
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.data.trees import Tree, parse_bracketed
from powerclip.encoders import build
from powerclip.encoders.fp8 import why_not
from powerclip.errors import UserError
from powerclip.runtime.distributed import Ranks
from powerclip.train.loop import train_step
from powerclip.train.mfu import Mfu
from powerclip.train.optimizer import make_optimizer
from powerclip.train.recipe import Recipe, load_recipe
from powerclip.train.sections import ModelSection, RegionsSection, TrainSection
from powerclip.train.state import start
from powerclip.train.towers import in_bf16, is_compiled

T = TypeVar("T")

TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2},
    "text_cfg": {"context_length": 77, "width": 32, "heads": 2, "layers": 2},
}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "our CLIP": ("clip", {}),
    "PowerCLIP-NLA, hardest": ("powerclip", {"negatives": "hardest"}),
    "PowerCLIP-NLA, k = 32": ("powerclip", {"negatives": "k"}),
    "PowerCLIP-NLA, all": ("powerclip", {"negatives": "all"}),
    "PowerCLIP-exact, hardest": ("powerclip", {"aggregation": "exact", "negatives": "hardest"}),
    "PowerCLIP-exact, k = 32": ("powerclip", {"aggregation": "exact", "negatives": "k"}),
    "PowerCLIP-exact, all": ("powerclip", {"aggregation": "exact", "negatives": "all"}),
    "PowerCLIP-cosine, all": (
        "powerclip",
        {"aggregation": "exact", "similarity": "cosine", "largest_set": 0, "negatives": "all"},
    ),
    "PowerCLIP-exact, hardest, M = 14": ("powerclip", {"aggregation": "exact", "negatives": "hardest"}),
    "plain autograd NLA, k = 32": ("powerclip", {"negatives": "k", "gradient": "autograd", "backend": "reference"}),
}
FP8 = "CLIP in fp8"
OURS[FP8] = ("clip", {})
OPEN_CLIP = "open_clip CLIP, 77 tokens"


@dataclass(frozen=True)
class SimulatedRanks(Ranks):
    """One of several ranks; the others hold the same as this one and cost nothing."""

    def gather(self, values: Tensor) -> Tensor:
        return values.repeat(self.count, *[1] * (values.ndim - 1))

    def sum(self, values: Tensor) -> Tensor:
        return values * self.count

    def mean(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values

    def exchange(self, values: Tensor) -> Tensor:
        received = values.unflatten(0, (self.count, -1))
        if values.is_floating_point():
            return received
        # Numbers of images: each rank has others, so that the hardest ones lie on several ranks, as in a real run.
        shape = (-1, *[1] * (received.ndim - 1))
        return received + torch.arange(self.count, device=values.device).view(shape) * received.shape[1]

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        pass

    def numbers(self, *values: int) -> list[tuple[int, ...]]:
        return [values] * self.count

    def collect(self, value: T) -> list[T]:
        return [value] * self.count


@dataclass(frozen=True)
class Row:
    name: str
    ms: float | None = None  # median of the rounds' medians
    rounds: list[float] = field(default_factory=list)
    images_per_second: float | None = None
    gib: float | None = None  # peak, with weights and optimiser state
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="towers of two layers, 16 pairs, two repetitions")
    parser.add_argument("--model", default="ViT-B-16", help="an open_clip model")
    parser.add_argument("--towers", type=Path, help="a recipe whose model is measured, instead of --model")
    parser.add_argument("--batch", type=int, default=512, help="pairs")
    parser.add_argument("--regions", type=int, default=10, help="M")
    parser.add_argument("--backend", default="auto", help="auto, reference, torch or triton")
    parser.add_argument("--trees", type=Path, help="TSV file of bracketed trees, one caption each")
    parser.add_argument("--compile", default="auto", help="auto, always, blocks or never")
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks; all but one are simulated")
    parser.add_argument("--only", action="append", help="steps whose name contains this; may be given several times")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2, help="steps in a round, after one that is not timed")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs, repeats = (16, 1) if arguments.tiny else (arguments.batch, arguments.repeats)
    model = ModelSection(config=TINY) if arguments.tiny else ModelSection(name=arguments.model)
    if arguments.towers:
        model = load_recipe(arguments.towers).model
    train = TrainSection(batch_size=pairs, device=device.type, compile=arguments.compile)
    few, many = (4, 5) if arguments.tiny else (arguments.regions, 14)
    batches = {count: make_batch(model, pairs, count, arguments.trees).to(device) for count in {few, many}}
    ranks = SimulatedRanks(0, arguments.ranks)

    def ours(name: str) -> Callable[[], object]:
        objective, settings = OURS[name]
        batch = batches[many if "M = 14" in name else few]
        recipe = Recipe(
            model=model,
            objective=objective,
            regions=RegionsSection(count=batch.regions.shape[1]),
            alignment=AlignmentConfig(**{"backend": arguments.backend, **settings}),
            train=replace(train, precision="fp8") if name == FP8 else train,
        )
        return our_step(recipe, batch, ranks)

    steps: dict[str, Callable[[], Callable[[], object]]] = {
        OPEN_CLIP: lambda: open_clip_step(model, train, batches[few]),
        **{name: partial(ours, name) for name in OURS},
    }
    if obstacle := why_not(device):
        del steps[FP8]
        print(f"{FP8} is left out: it {obstacle}")
    wanted = [name for name in steps if any(part in name for part in arguments.only)] if arguments.only else list(steps)
    name, text = "step-tiny" if arguments.tiny else f"step-{device.type}", ""
    for rows in timed({name: steps[name] for name in wanted}, pairs, repeats, arguments.rounds, device):
        shares = utilisations(rows, model, batches[few], device)
        text = report(rows, shares, batches[few], arguments, name)
    print(text)


def make_batch(model: ModelSection, pairs: int, regions: int, trees: Path | None) -> Batch:
    encoder = build(name=model.name, config=model.config)
    captions = real_captions(trees, pairs) if trees else scene_captions(pairs)
    tokenizer = CaptionTokenizer(context_length=encoder.context_length)
    tokenized = [tokenizer.encode(caption) for caption, _ in captions]
    order = sorted(range(pairs), key=lambda number: len(tokenized[number].ids))  # as the loaders do for a GPU
    captions, tokenized = [captions[number] for number in order], [tokenized[number] for number in order]
    tokens = tokenizer.pad([caption.ids for caption in tokenized], multiple=16)
    longest = len(tokenized[shorter_captions(pairs) - 1].ids)
    generator = torch.Generator().manual_seed(0)
    return Batch(
        images=torch.randn(pairs, 3, *encoder.image_size, generator=generator),
        tokens=tokens,
        regions=random_boxes(pairs, regions, encoder.grid, generator),
        phrases=pack_phrases([tree for _, tree in captions], tokenized, tokens.shape[1]),
        keys=[str(number) for number in range(pairs)],
        short=min(-(-longest // 16) * 16, tokens.shape[1]),
        lengths=tuple(len(caption.ids) for caption in tokenized),
    )


def scene_captions(count: int) -> list[tuple[str, Tree]]:
    scenes = [generate(0, number, "train") for number in range(count)]
    return [(scene.caption, scene.tree) for scene in scenes]


def real_captions(path: Path, count: int) -> list[tuple[str, Tree]]:
    """The trees' words are the captions: their lengths and shapes are what costs time."""
    captions = []
    for brackets in islice(read_tree_file(path).values(), count):
        caption = " ".join(re.findall(r"\(\S+ ([^()\s]+)\)", brackets))
        captions.append((caption, parse_bracketed(brackets, caption)))
    if len(captions) < count:
        raise UserError(f"{path} has {len(captions)} trees, fewer than the {count} of a batch")
    return captions


def our_step(recipe: Recipe, batch: Batch, ranks: Ranks) -> Callable[[], object]:
    state = replace(start(recipe), ranks=ranks)
    return lambda: train_step(state, batch, recipe)


def open_clip_step(model: ModelSection, train: TrainSection, batch: Batch) -> Callable[[], object]:
    from open_clip import ClipLoss

    device = torch.device(train.device)
    clip = build(name=model.name, config=model.config).clip.to(device).train()
    run = torch.compile(clip, dynamic=False) if is_compiled(train, device) else clip
    loss = ClipLoss()
    recipe = Recipe(model=model)
    optimizer = make_optimizer([clip], recipe.optim)
    tokens = torch.nn.functional.pad(batch.tokens, (0, clip.context_length - batch.tokens.shape[1]))

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bf16(train, device)):
            output = run(batch.images, tokens)
            image, text, scale = output[:3] if isinstance(output, tuple) else output.values()
            total = loss(image, text, scale)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        optimizer.step()
        with torch.no_grad():
            clip.logit_scale.clamp_(0, 4.6052)
        return total

    return step


def timed(
    steps: Mapping[str, Callable[[], Callable[[], object]]], pairs: int, repeats: int, rounds: int, device: torch.device
) -> Iterator[list[Row]]:
    """Prepare and try each step, then time all of them in turn; gives the rows after each round."""
    rows = {name: Row(name) for name in steps}
    ready: dict[str, Callable[[], object]] = {}
    for name, prepare in steps.items():
        began = time.perf_counter()
        before = torch.cuda.memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0  # by other steps
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            step = prepare()
            step()  # launched one by one; what a replayed graph takes is not counted by torch
            if device.type == "cuda":
                rows[name] = replace(rows[name], gib=torch.cuda.max_memory_allocated(device) / 2**30 - before)
            for _ in range(3):  # until graphs are recorded
                step()
            ready[name] = step
        except torch.OutOfMemoryError:
            rows[name] = replace(rows[name], note="out of memory")
        print(f"{name}: {rows[name].note or f'ready after {time.perf_counter() - began:.0f} s'}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, step in ready.items():
            times[name].append(measure(step, device, repeats, warmup=1).ms)
        for name, measured in times.items():
            ms = statistics.median(measured)
            rows[name] = replace(rows[name], ms=ms, rounds=[*measured], images_per_second=1000 * pairs / ms)
        yield list(rows.values())


def utilisations(rows: list[Row], model: ModelSection, batch: Batch, device: torch.device) -> dict[str, float]:
    """MFU of each step's towers, by its name."""
    shares = {}
    for row in rows:
        if row.images_per_second is None:
            continue
        objective, _ = OURS.get(row.name, ("clip", {}))
        length = 77 if row.name == OPEN_CLIP else round(batch.padded_length)
        values = Mfu(Recipe(model=model, objective=objective), device).read(row.images_per_second, length)
        if values:
            shares[row.name] = values["mfu"]
    return shares


def report(
    rows: list[Row],
    shares: Mapping[str, float],
    batch: Batch,
    arguments: argparse.Namespace,
    name: str,
) -> str:
    """Write the results so far; return the table."""
    provenance = origin()
    by_name = {row.name: row for row in rows}

    def ratio(row: Row, base: str) -> str:
        other = by_name.get(base)
        if other is None or row.ms is None or other.ms is None:
            return "–"
        # Each round is compared with the other's of the same round.
        return f"{statistics.median(a / b for a, b in zip(row.rounds, other.rounds, strict=True)):.3f}"

    def memory(row: Row) -> str:
        base = by_name.get("our CLIP")
        return "–" if row.gib is None or base is None or base.gib is None else f"{row.gib / base.gib:.3f}"

    cells = [
        [
            row.name,
            "–" if row.ms is None else f"{row.ms:.1f}",
            "–" if row.images_per_second is None else f"{row.images_per_second:.0f}",
            "–" if row.gib is None else f"{row.gib:.2f}",
            ratio(row, "our CLIP"),
            memory(row),
            ratio(row, OPEN_CLIP),
            f"{shares[row.name]:.0%}" if row.name in shares else "–",
            row.note,
        ]
        for row in rows
    ]
    facts = {
        "pairs": f"{len(batch)} × {len(batch) * arguments.ranks}",
        "M": batch.regions.shape[1],
        "mean K": round(len(batch.phrases.node_start) / len(batch), 2),
        "tokens a caption": f"{batch.padded_length:.1f} padded",
    }
    heads = (
        "step",
        "ms",
        "images/s",
        "GiB",
        "time / our CLIP",
        "memory / our CLIP",
        "time / open_clip",
        "MFU",
        "note",
    )
    text = "# A training step\n\n" + ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n\n"
    text += markdown(cells, heads)
    data = {"batch": facts, "rows": [asdict(row) for row in rows], "mfu": dict(shares)}
    path = write_result(arguments.output, name, provenance, data, text)
    return f"{text}\n\n{path}.json, .md"


if __name__ == "__main__":
    run(main)
