"""What the alignment costs (Appendix E): a training step against the number of regions M, and each method beside CLIP.

Four ways to the same loss, as the paper prints it: approximated (NLA) or exact, and with a gradient for all pairs of
the batch, as autograd does it, or for the chosen ones that carry any. Measured on the machine at hand, with small
towers where that is a CPU, or read from the files that `benchmarks/` wrote.

Axes: C pairs of the batch · M regions · T nodes of all captions
"""

from __future__ import annotations

import datetime
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from powerclip.alignment.backends import triton_obstacle
from powerclip.alignment.config import AlignmentConfig
from powerclip.analysis.measure import measure
from powerclip.analysis.step_time import Method, beside_clip, take_turns
from powerclip.data.batch import Batch
from powerclip.errors import UserError
from powerclip.objectives import OBJECTIVES
from powerclip.runtime.environment import machine
from powerclip.runtime.files import write_atomic
from powerclip.train.data import make_loader
from powerclip.train.recipe import (
    DataSection,
    ModelSection,
    OptimSection,
    Recipe,
    RegionsSection,
    TrainSection,
)
from powerclip.train.towers import is_compiled

Say = Callable[[str], object]
WAYS: dict[str, dict[str, Any]] = {
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
MOST = 2**26  # similarities of sets in one tensor that a CPU is asked for: a step then keeps about 3 GiB


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


@dataclass(frozen=True)
class Curves:
    """Time and memory against M, a line for each way."""

    title: str
    lines: Mapping[str, Sequence[tuple[int, float, float | None]]]  # M, ms, GiB
    level: tuple[str, float, float | None] | None = None  # one that does not depend on M: name, ms, GiB


@dataclass(frozen=True)
class Bar:
    """A step's time relative to CLIP's."""

    name: str
    relative: float
    smallest: float
    largest: float
    paper: float | None = None


@dataclass(frozen=True)
class Bars:
    """Several of them."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Cost:
    """What the figure shows."""

    curves: tuple[Curves, ...] = ()
    bars: tuple[Bars, ...] = ()


def analyse(
    output: Path,
    sources: Sequence[Path] = (),
    *,
    device: str | None = None,
    size: Size | None = None,
    say: Say = lambda text: None,
) -> Cost:
    """Measure, or read `sources`; write `cost.png`, and `cost.json` where it was measured, into `output`.

    Raises:
        UserError: a source holds no measurement, or there is no such device.
    """
    from powerclip.runtime.distributed import choose_device

    if sources:
        cost = merge([read_cost(path) for path in sources])
    else:
        chosen = choose_device(device or "auto")
        content = measure_cost(size or Size.for_device(chosen), chosen, say)
        write_atomic(output / "cost.json", (json.dumps(content, indent=1) + "\n").encode())
        cost = from_content(content, "cost.json")
    from powerclip.analysis.cost_figure import cost_figure
    from powerclip.report.heatmaps import save_png

    save_png(cost_figure(cost), output / "cost.png")
    return cost


def measure_cost(size: Size, device: torch.device, say: Say = lambda text: None) -> dict[str, Any]:
    """The steps over M and the methods, as `cost.json` holds them."""
    clip = Method.of(recipe_for(size, device, "clip"))
    compiled = is_compiled(clip.recipe.train, device)
    batch = make_loader(clip.recipe, clip.state.encoder, compiled=compiled).batch(0).to(device)
    steps = list(_over_regions(size, device, clip, batch, say))
    del clip
    _free(device)
    methods = {name: Method.of(recipe_for(size, device, name)) for name in OBJECTIVES}
    for method in methods.values():
        for _ in range(2):  # the first step compiles, the second finds out whether once was enough
            method.step(batch)
    take_turns(methods, batch, size.rounds, size.repeats, lambda name, found: say(f"{name}: {found.ms:.1f} ms"))
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
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


def _over_regions(size: Size, device: torch.device, clip: Method, batch: Batch, say: Say) -> Iterator[dict[str, Any]]:
    yield _timed("CLIP", None, clip, batch, size.repeats, say)
    for way, settings in WAYS.items():
        config = AlignmentConfig.named("paper", **settings)
        if "backend" not in settings and device.type == "cuda" and triton_obstacle(config, device) is None:
            settings = {**settings, "backend": "triton"}
        method = Method.of(recipe_for(size, device, "powerclip", preset="paper", **settings))
        for count in size.regions:
            sets = len(batch.phrases.node_start) * len(batch) * 2**count
            if config.aggregation == "exact" and device.type == "cpu" and sets > MOST:
                yield _row(way, count, note="too large")
                continue
            part = replace(batch, regions=batch.regions[:, :count])
            yield _timed(way, count, method, part, size.repeats, say)
        del method
        _free(device)


def _timed(way: str, count: int | None, method: Method, batch: Batch, repeats: int, say: Say) -> dict[str, Any]:
    try:
        found = measure(partial(method.step, batch), method.state.device, repeats, warmup=2, count_tensors=True)
    except torch.OutOfMemoryError:
        _free(method.state.device)
        say(f"{way}, M = {count}: out of memory")
        return _row(way, count, note="out of memory")
    say(f"{way}{'' if count is None else f', M = {count}'}: {found.ms:.1f} ms, {found.gib or 0:.3f} GiB")
    return _row(way, count, found.ms, found.spread, found.gib)


def _row(
    way: str,
    count: int | None,
    ms: float | None = None,
    spread: float | None = None,
    gib: float | None = None,
    note: str = "",
) -> dict[str, Any]:
    return {"way": way, "M": count, "ms": ms, "spread": spread, "gib": gib, "note": note}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def read_cost(path: Path) -> Cost:
    """The measurements in a file: `cost.json`, or what `benchmarks/` writes (alignment, step, methods).

    Raises:
        UserError: it is not there, or holds something else.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a JSON file ({error})") from None
    return from_content(content, str(path))


def from_content(content: Any, where: str) -> Cost:
    """What a file's content shows; `where` is what messages call it."""
    wrong = UserError(f"{where}: no measurement of cost (cost.json, or a result of benchmarks/ in JSON is expected)")
    if not isinstance(content, Mapping):
        raise wrong
    try:
        if "steps" in content and "methods" in content:
            return _ours(content)
        rows, on = content["rows"], str(content["origin"]["machine"])
        if "method" in rows[0]:
            return Cost(bars=(Bars(f"A step beside CLIP's\n{content['about']}\n{on}", _bars(rows)),))
        if "sweep" in rows[0]:
            return Cost(curves=(_scoring(rows, on),))
        return Cost(bars=(_steps(rows, on),))
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
        raise wrong from None


def _ours(content: Mapping[str, Any]) -> Cost:
    lines: dict[str, list[tuple[int, float, float | None]]] = {}
    level = None
    for row in content["steps"]:
        if row["ms"] is None:
            continue
        if row["M"] is None:
            level = (row["way"], row["ms"], row["gib"])
        else:
            lines.setdefault(row["way"], []).append((int(row["M"]), float(row["ms"]), row["gib"]))
    about = f"{content['pairs']} pairs, {content['nodes']} nodes\n{content['machine']}"
    return Cost(
        (Curves(f"A training step, {about}", lines, level),),
        (Bars(f"A step beside CLIP's, {about}", _bars(content["methods"])),),
    )


def _bars(rows: Sequence[Mapping[str, Any]]) -> tuple[Bar, ...]:
    if not rows:
        raise ValueError("no method was measured")
    return tuple(
        Bar(row["method"], float(row["relative"]), float(row["smallest"]), float(row["largest"]), row.get("paper"))
        for row in rows
    )


def _scoring(rows: Sequence[Mapping[str, Any]], on: str) -> Curves:
    """`benchmarks/alignment.py`: scoring all pairs, without the towers."""
    lines: dict[str, list[tuple[int, float, float | None]]] = {}
    chosen = [row for row in rows if row["sweep"] == "M" and row["ms"] is not None and row["what"] != "monte carlo"]
    for row in chosen:
        name = f"{row['what']}, {row['backend']}" + (" (bf16)" if row["dtype"] == "bfloat16" else "")
        lines.setdefault(name, []).append((row["size"]["regions"], row["ms"], row["gib"]))
    size = chosen[0]["size"]
    return Curves(f"Scoring {size['images']} images × {size['captions']} captions\n{on}", lines)


def _steps(rows: Sequence[Mapping[str, Any]], on: str) -> Bars:
    """`benchmarks/step.py`: whole steps in several settings."""
    clip = next((row["ms"] for row in rows if row["name"] == "our CLIP"), None) or rows[0]["ms"]
    shown = [row for row in rows if row["ms"] is not None]
    if not shown:
        raise ValueError("no step was measured")
    bars = [(row["name"], row["ms"], row.get("spread") or 0.0) for row in shown]
    return Bars(
        f"A training step beside our CLIP's\n{on}",
        tuple(Bar(name, ms / clip, (ms - spread) / clip, (ms + spread) / clip) for name, ms, spread in bars),
    )


def merge(costs: Sequence[Cost]) -> Cost:
    """All of them in one figure."""
    return Cost(
        tuple(curves for cost in costs for curves in cost.curves),
        tuple(bars for cost in costs for bars in cost.bars),
    )


def lines(cost: Cost) -> list[str]:
    """The numbers as text."""
    shown = []
    for curves in cost.curves:
        shown.append(curves.title.replace("\n", ", "))
        values = sorted({m for line in curves.lines.values() for m, _, _ in line})
        width = max(map(len, curves.lines), default=0)
        shown.append(f"  {'ms a step, M =':{width}}" + "".join(f"{m:>9d}" for m in values))
        for name, line in curves.lines.items():
            by_count = {m: ms for m, ms, _ in line}
            cells = [f"{by_count[m]:9.1f}" if m in by_count else f"{'–':>9}" for m in values]
            shown.append(f"  {name:{width}}" + "".join(cells))
        if curves.level:
            shown.append(f"  {curves.level[0]:{width}}{curves.level[1]:9.1f}")
    for bars in cost.bars:
        shown.append(bars.title.replace("\n", ", "))
        width = max(len(bar.name) for bar in bars.bars)
        for bar in bars.bars:
            paper = f"   paper {bar.paper:.2f}" if bar.paper else ""
            shown.append(f"  {bar.name:{width}} × {bar.relative:.2f} ({bar.smallest:.2f} … {bar.largest:.2f}){paper}")
    return shown
