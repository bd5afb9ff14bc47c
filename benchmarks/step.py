"""One training step of open_clip's CLIP, our CLIP and PowerCLIP in several settings: same towers, data and batch.

    python benchmarks/step.py --trees DATA/captions10k/trees.tsv.gz     # on a GPU: ViT-B/16, 512 pairs
    python benchmarks/step.py --tiny                                    # on a CPU, in seconds: shows that it works

open_clip's step is its own model and its own ClipLoss at its own 77 tokens; ours encode captions at their length. All
use the same precision, compilation and optimiser. Captions and trees are real ones when a file of trees is given, else
those of the embedded scenes; pictures are noise, which costs the same. Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, markdown, measure, origin, write_result
from torch import Tensor

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.regions import random_boxes
from powerclip.alignment.trees import Tree, parse_bracketed
from powerclip.data.batch import Batch
from powerclip.data.corpus import read_trees
from powerclip.data.scenes import generate
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.encoders import build
from powerclip.errors import UserError
from powerclip.train.loop import train_step
from powerclip.train.optimizer import make_optimizer
from powerclip.train.recipe import ModelSection, Recipe, RegionsSection, TrainSection
from powerclip.train.state import start
from powerclip.train.towers import in_bf16, is_compiled

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
    "plain autograd NLA, k = 32": ("powerclip", {"negatives": "k", "gradient": "autograd", "backend": "reference"}),
}
# The plain exact loss asks for 2^M numbers for each node and picture: only kernels make it a step on a GPU.
NEEDS_KERNELS = tuple(name for name in OURS if "exact" in name)


@dataclass(frozen=True)
class Row:
    name: str
    ms: float | None = None
    spread: float | None = None
    images_per_second: float | None = None
    gib: float | None = None  # peak, with weights and optimiser state
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="towers of two layers, 16 pairs, two repetitions")
    parser.add_argument("--model", default="ViT-B-16", help="an open_clip model")
    parser.add_argument("--batch", type=int, default=512, help="pairs")
    parser.add_argument("--regions", type=int, default=10, help="M")
    parser.add_argument("--backend", default="auto", help="auto, reference, torch or triton")
    parser.add_argument("--trees", type=Path, help="TSV file of bracketed trees, one caption each")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    pairs, repeats = (16, 2) if arguments.tiny else (arguments.batch, arguments.repeats)
    model = ModelSection(config=TINY) if arguments.tiny else ModelSection(name=arguments.model)
    train = TrainSection(batch_size=pairs, device="cuda" if gpu else "cpu")
    batch = make_batch(model, pairs, arguments.regions if not arguments.tiny else 4, arguments.trees)
    batch = batch.to(train.device)

    rows = [timed("open_clip CLIP, 77 tokens", pairs, repeats, train, lambda: open_clip_step(model, train, batch))]
    for name, (objective, settings) in OURS.items():
        settings = {"backend": arguments.backend, **settings}
        if name in NEEDS_KERNELS and gpu and arguments.backend == "auto":
            settings["backend"] = "triton"
        recipe = Recipe(
            model=model,
            objective=objective,
            regions=RegionsSection(count=batch.regions.shape[1]),
            alignment=AlignmentConfig(**settings),
            train=train,
        )
        rows.append(timed(name, pairs, repeats, train, lambda recipe=recipe: our_step(recipe, batch)))
    report(rows, batch, arguments.output, "step-tiny" if arguments.tiny else f"step-{train.device}")


def make_batch(model: ModelSection, pairs: int, regions: int, trees: Path | None) -> Batch:
    encoder = build(name=model.name, config=model.config)
    captions = real_captions(trees, pairs) if trees else scene_captions(pairs)
    tokenizer = CaptionTokenizer(context_length=encoder.context_length)
    tokenized = [tokenizer.encode(caption) for caption, _ in captions]
    tokens = tokenizer.pad([caption.ids for caption in tokenized], multiple=8)
    generator = torch.Generator().manual_seed(0)
    return Batch(
        images=torch.randn(pairs, 3, *encoder.image_size, generator=generator),
        tokens=tokens,
        regions=random_boxes(pairs, regions, encoder.grid, generator),
        phrases=pack_phrases([tree for _, tree in captions], tokenized, tokens.shape[1]),
        keys=[str(number) for number in range(pairs)],
    )


def scene_captions(count: int) -> list[tuple[str, Tree]]:
    scenes = [generate(0, number, "train") for number in range(count)]
    return [(scene.caption, scene.tree) for scene in scenes]


def real_captions(path: Path, count: int) -> list[tuple[str, Tree]]:
    """The trees' words are the captions: their lengths and shapes are what costs time."""
    captions = []
    for brackets in islice(read_trees(path).values(), count):
        caption = " ".join(re.findall(r"\(\S+ ([^()\s]+)\)", brackets))
        captions.append((caption, parse_bracketed(brackets, caption)))
    if len(captions) < count:
        raise UserError(f"{path} has {len(captions)} trees, fewer than the {count} of a batch")
    return captions


def our_step(recipe: Recipe, batch: Batch) -> Callable[[], object]:
    state = start(recipe)
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


def timed(name: str, pairs: int, repeats: int, train: TrainSection, prepare: Callable[[], Callable[[], object]]) -> Row:
    device = torch.device(train.device)
    try:
        found = measure(prepare(), device, repeats, warmup=3)
        row = Row(name, found.ms, found.spread, 1000 * pairs / found.ms, found.peak_gib)
    except torch.OutOfMemoryError:
        row = Row(name, note="out of memory")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    print(name, "–" if row.ms is None else f"{row.ms:.1f} ms", row.note, flush=True)
    return row


def report(rows: list[Row], batch: Batch, folder: Path, name: str) -> None:
    made = origin()
    ours = next(row for row in rows if row.name == "our CLIP")

    def ratio(value: float | None, base: float | None) -> str:
        return "–" if value is None or not base else f"{value / base:.3f}"

    cells = [
        [
            row.name,
            "–" if row.ms is None else f"{row.ms:.1f} ± {row.spread:.1f}",
            "–" if row.images_per_second is None else f"{row.images_per_second:.0f}",
            "–" if row.gib is None else f"{row.gib:.2f}",
            ratio(row.ms, ours.ms),
            ratio(row.gib, ours.gib),
            row.note,
        ]
        for row in rows
    ]
    nodes = len(batch.phrases.node_start) / len(batch)
    facts = {"pairs": len(batch), "M": batch.regions.shape[1], "mean K": round(nodes, 2), "L": batch.tokens.shape[1]}
    text = "# A training step\n\n" + ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n\n"
    text += markdown(cells, ("step", "ms", "images/s", "GiB", "time / our CLIP", "memory / our CLIP", "note"))
    path = write_result(folder, name, made, {"batch": facts, "rows": [asdict(row) for row in rows]}, text)
    print(f"{text}\n\n{path}.json, .md")


if __name__ == "__main__":
    main()
