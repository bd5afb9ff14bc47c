"""Is SPARC's local loss solved without looking? The loss of trained models with the images' own and others' patches.

    powerclip compare studies/sparc.yaml --seeds 1 --keep-models
    python benchmarks/sparc.py runs/sparc/*/seed-0

On the validation images of `$POWERCLIP_DATA/captions10k` with a caption each, at the scale that the run has learned. A
loss that is as low with the patches of another image says nothing about images: the tokens of a caption tell each other
apart by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from torch import Tensor

from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import load
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.tasks import CaptionRetrieval
from powerclip.objectives import SparcSettings
from powerclip.objectives.base import real_tokens
from powerclip.objectives.sparc import sparc_loss
from powerclip.report.table import Table
from powerclip.train.metrics import read_metrics
from powerclip.train.recipe import parse_recipe
from powerclip.train.run_folder import RunFolder

BATCH = 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", "-o", type=Path, help="a JSON file")
    given = parser.parse_args()
    data = read_path(Path(os.environ["POWERCLIP_DATA"]) / "captions10k" / "val-000.tar")
    assert isinstance(data, CaptionRetrieval)
    found = {}
    for run in given.runs:
        recipe = parse_recipe((run / "recipe.yaml").read_text(encoding="utf-8"), str(run))
        if recipe.objective == "sparc":
            settings = SparcSettings(**recipe.objective_settings)
            found[run.parent.name] = local_losses(RunFolder(run), data, settings)
            print(run.parent.name, found[run.parent.name], flush=True)
    columns = list(next(iter(found.values())))
    print(
        Table.plain(
            ["", *columns], [[name, *(f"{row[c]:.3f}" for c in columns)] for name, row in found.items()]
        ).markdown()
    )
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@torch.inference_mode()
def local_losses(run: RunFolder, data: CaptionRetrieval, settings: SparcSettings) -> dict[str, float]:
    """The local loss with the own image's patches, another's, and the same patches for all; and what chance is."""
    encoder, _, tokenizer = load(run.model, device="cuda" if torch.cuda.is_available() else "cpu")
    tokenizing = CaptionTokenizer(tokenizer)
    embedder = Embedder(encoder, tokenizing)
    rows = list(read_metrics(run.metrics))
    scale = torch.tensor(next(row["local_scale"] for row in reversed(rows) if "local_scale" in row)).to(embedder.device)
    first = {image: number for number, image in reversed(list(enumerate(data.image_of_caption.tolist())))}
    totals = {"own image": 0.0, "another image": 0.0, "one patch for all": 0.0, "chance": 0.0}
    count = 0

    def add(images: list[int], patches: Tensor) -> None:
        nonlocal count
        ids = tokenizing.pad([tokenizing.encode(data.captions[first[image]]).ids for image in images])
        tokens = ids.to(patches.device)
        _, words = encoder.encode_words(tokens)
        real = real_tokens(tokens, settings.ends)
        same = patches.mean((0, 1)).expand_as(patches)
        for name, used in zip(totals, (patches, patches.roll(1, 0), same), strict=False):
            totals[name] += len(images) * sparc_loss(words, used, real, scale).item()
        totals["chance"] += real.sum(1).log().sum().item()
        count += len(images)

    embedder.patches(data.images, add)  # type: ignore[arg-type]
    return {name: total / count for name, total in totals.items()}


if __name__ == "__main__":
    main()
