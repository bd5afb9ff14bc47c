"""Step time of every method relative to CLIP's, in one run.

    python benchmarks/methods.py                # on a GPU: ViT-B/16, batch 512, bf16, compiled
    python benchmarks/methods.py --tiny         # a minute on a CPU: shows that it works, measures nothing

A step is what training does: towers, loss, gradient, AdamW and what the method does after it; the batch lies on the
device already. Methods take turns, so that a clock that slows down slows all of them. Writes a JSON file and a Markdown
table, beside what the paper's Table 13 says of an epoch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from measure import RESULTS, markdown, origin, write_result

from powerclip.analysis.step_time import Method, beside_clip, take_turns
from powerclip.data.batch import Batch
from powerclip.objectives import OBJECTIVES
from powerclip.train.data import make_loader
from powerclip.train.recipe import parse_recipe

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, two repetitions, not compiled")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--compile", default="auto", help="auto, always, blocks or never")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10, help="steps of a method in each round")
    parser.add_argument("--only", nargs="*", choices=OBJECTIVES, default=OBJECTIVES, help="methods beside clip")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.batch, arguments.rounds, arguments.repeats = 8, 2, 2
    device = torch.device(arguments.device)
    methods: dict[str, Method] = {}
    batch = None
    for name in dict.fromkeys(["clip", *arguments.only]):
        methods[name] = made(name, arguments)
        if batch is None:
            encoder, recipe = methods[name].state.encoder, methods[name].recipe
            batch = make_loader(recipe, encoder, compiled=not arguments.tiny).batch(0).to(device)
        began = time.perf_counter()
        for _ in range(2):  # the first step compiles, the second finds out whether once was enough
            methods[name].step(batch)
        print(f"{name:10} ready after {time.perf_counter() - began:.0f} s", flush=True)
    assert batch is not None
    take_turns(
        methods,
        batch,
        arguments.rounds,
        arguments.repeats,
        lambda name, found: print(f"{name:10} {found.ms:9.2f} ms", flush=True),
    )
    write(methods, batch, arguments)


def made(name: str, arguments: argparse.Namespace) -> Method:
    settings = "{hidden: 32, output: 16}" if arguments.tiny and name == "a_clip" else "{}"
    text = RECIPE.format(
        model=TINY if arguments.tiny else LARGE,
        objective=name,
        settings=settings,
        batch=arguments.batch,
        device=arguments.device,
        compile="never" if arguments.tiny else arguments.compile,
    )
    return Method.of(parse_recipe(text, "benchmarks/methods.py"))


def write(methods: dict[str, Method], batch: Batch, arguments: argparse.Namespace) -> None:
    data = [{**row, "target": TARGET.get(row["method"])} for row in beside_clip(methods)]
    rows = [
        [
            row["method"],
            f"{row['ms']:.1f}",
            f"{row['relative']:.3f} ({row['smallest']:.3f} … {row['largest']:.3f})",
            "–" if row["gib"] is None else f"{row['gib']:.1f}",
            row["paper"] or "–",
            row["target"] or "–",
        ]
        for row in data
    ]
    heads = ["method", "ms a step", "× CLIP (of the rounds)", "GiB", "paper, × CLIP an epoch", "target"]
    model = "a tiny model: the times mean nothing" if arguments.tiny else "ViT-B/16"
    about = f"{model}, batch {arguments.batch}, captions of {batch.tokens.shape[1]} tokens"
    text = f"# Step time of every method\n\n{about}\n\n{markdown(rows, heads)}"
    name = "methods-tiny" if arguments.tiny else f"methods-{arguments.device.split(':')[0]}"
    path = write_result(arguments.output, name, origin(), {"about": about, "rows": data}, text)
    print(f"\n{text}\n\n{path}.md")


if __name__ == "__main__":
    main()
