"""What the alignment costs (Appendix E): a training step against the number of regions M, and each method beside CLIP.

    python benchmarks/cost.py                # ViT-B/16 on a GPU; on a CPU the quickstart's towers, about five minutes
    python benchmarks/cost.py --tiny         # seconds on a CPU: shows that it works, measures nothing
    python benchmarks/cost.py --from benchmarks/results/2026-11-15-step-cuda.json --output runs/h200     # draws results

Four ways to the same loss, as the paper prints it: approximated (NLA) or exact, and with a gradient for all pairs of
the batch, as autograd does it, or only for those that carry one. Writes a JSON file, Markdown tables and a figure;
with --from only the figure, `cost.png`, of results of this script or of alignment.py, step.py and methods.py.

Axes: C pairs of the batch · M regions · T nodes of all captions
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cost_plot import Cost, cost_figure, from_content, merge, read_cost, tables
from measure import RESULTS, measure, origin, run, write_result
from methods import Method, beside_clip, take_turns

from powerclip.alignment.config import AlignmentConfig
from powerclip.data.batch import Batch
from powerclip.objectives import OBJECTIVES
from powerclip.runtime.distributed import choose_device
from powerclip.train.data import make_loader
from powerclip.train.recipe import Recipe
from powerclip.train.sections import DataSection, ModelSection, OptimSection, RegionsSection, TrainSection
from powerclip.train.towers import is_compiled

Report = Callable[[str], object]
VARIANTS: dict[str, dict[str, Any]] = {
    "exact, all pairs": {"aggregation": "exact", "gradient": "autograd", "backend": "reference"},
    "exact, chosen pairs": {"aggregation": "exact", "gradient": "select"},
    "NLA, all pairs": {"aggregation": "nla", "gradient": "autograd", "backend": "reference"},
    "NLA, chosen pairs": {"aggregation": "nla", "gradient": "select"},
}
SMALL = {
    "embed_dim": 96,
    "vision_cfg": {"image_size": 64, "patch_size": 8, "width": 96, "layers": 3, "head_width": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 96, "heads": 3, "layers": 2},
}
MOST_ENUMERATED = 2**26  # similarities of sets in one tensor on a CPU: a step then keeps about 3 GiB


@dataclass(frozen=True)
class Size:
    """What is measured."""

    model: ModelSection
    pairs: int  # C
    regions: tuple[int, ...]  # M
    repeats: int
    rounds: int  # of the methods

    @classmethod
    def for_device(cls, device: torch.device) -> Size:
        """ViT-B/16 on a GPU; on a CPU the towers of the quickstart and a small batch."""
        if device.type == "cuda":
            return cls(ModelSection(name="ViT-B-16"), 256, (5, 6, 7, 8, 10, 12, 14, 16), 10, 3)
        return cls(ModelSection(config=SMALL), 64, (2, 4, 6, 7, 8, 10, 12, 15), 5, 3)


TINY = Size(
    ModelSection(
        config={
            "embed_dim": 16,
            "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 16, "layers": 1, "head_width": 8},
            "text_cfg": {"context_length": 40, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1},
        }
    ),
    pairs=12,
    regions=(2, 4, 11),
    repeats=1,
    rounds=1,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, 12 pairs, one repetition")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--from", dest="sources", type=Path, nargs="+", default=[], help="draw these results instead")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.sources:
        cost = merge([read_cost(path) for path in arguments.sources])
        arguments.output.mkdir(parents=True, exist_ok=True)
        path, text = arguments.output / "cost.png", as_text(cost)
    else:
        device = choose_device(arguments.device, setting="--device")
        provenance = origin()
        size = TINY if arguments.tiny else Size.for_device(device)
        data = measure_cost(size, device, partial(print, flush=True))
        name = "cost-tiny" if arguments.tiny else f"cost-{device.type}"
        cost = from_content({"origin": provenance, **data}, name)
        text = as_text(cost)
        title = "# The cost of a step\n\n"
        path = write_result(arguments.output, name, provenance, data, title + text).with_suffix(".png")
    cost_figure(cost).savefig(path)
    print(f"{text}\n\n{path}")


def as_text(cost: Cost) -> str:
    return "\n\n".join(table.markdown() for table in tables(cost))


def measure_cost(size: Size, device: torch.device, report: Report = lambda text: None) -> dict[str, Any]:
    """The steps over M and the methods, as the result holds them."""
    clip = Method.of(recipe_for(size, device, "clip"))
    compiled = is_compiled(clip.recipe.train, device)
    batch = make_loader(clip.recipe, clip.state.encoder, compiled=compiled).batch(0).to(device)
    steps = list(_over_regions(size, device, clip, batch, report))
    del clip
    _free(device)
    methods = {name: Method.of(recipe_for(size, device, name)) for name in OBJECTIVES}
    for method in methods.values():
        for _ in range(2):  # the first step compiles, the second finds out whether once was enough
            method.step(batch)
    take_turns(methods, batch, size.rounds, size.repeats, lambda name, time: report(f"{name}: {time.ms:.1f} ms"))
    return {
        "pairs": size.pairs,
        "nodes": len(batch.phrases.node_start),
        "model": size.model.name or size.model.config,
        "steps": steps,
        "methods": beside_clip(methods),
    }


def recipe_for(size: Size, device: torch.device, objective: str, **alignment: Any) -> Recipe:
    """A recipe whose warm-up is never left: the weights hardly move, and FLIP's tuning is far away."""
    small = objective == "a_clip" and size.model.config is not None
    return Recipe(
        model=size.model,
        objective=objective,  # type: ignore[arg-type]
        objective_settings={"hidden": 256, "output": 64} if small else {},
        data=DataSection(workers=0),
        regions=RegionsSection(count=max(size.regions)),
        alignment=AlignmentConfig.named(**alignment),
        optim=OptimSection(warmup=1_000_000),
        train=TrainSection(steps=2_000_000, batch_size=size.pairs, device=str(device)),
    )


def _over_regions(
    size: Size, device: torch.device, clip: Method, batch: Batch, report: Report
) -> Iterator[dict[str, Any]]:
    yield _timed("CLIP", None, clip, batch, size.repeats, report)
    for variant, settings in VARIANTS.items():
        config = AlignmentConfig.named("paper", **settings)
        method = Method.of(recipe_for(size, device, "powerclip", preset="paper", **settings))
        for count in size.regions:
            sets = len(batch.phrases.node_start) * len(batch) * 2**count
            if config.aggregation == "exact" and device.type == "cpu" and sets > MOST_ENUMERATED:
                yield _row(variant, count, note="too large")
                continue
            part = replace(batch, regions=batch.regions[:, :count])
            yield _timed(variant, count, method, part, size.repeats, report)
        del method
        _free(device)


def _timed(
    variant: str, count: int | None, method: Method, batch: Batch, repeats: int, report: Report
) -> dict[str, Any]:
    try:
        measured = measure(partial(method.step, batch), method.state.device, repeats, warmup=2, count_tensors=True)
    except torch.OutOfMemoryError:
        _free(method.state.device)
        report(f"{variant}, M = {count}: out of memory")
        return _row(variant, count, note="out of memory")
    report(f"{variant}{'' if count is None else f', M = {count}'}: {measured.ms:.1f} ms, {measured.gib or 0:.3f} GiB")
    return _row(variant, count, measured.ms, measured.spread, measured.gib)


def _row(
    variant: str,
    count: int | None,
    ms: float | None = None,
    spread: float | None = None,
    gib: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    return {"variant": variant, "M": count, "ms": ms, "spread": spread, "gib": gib, "note": note}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(main)
