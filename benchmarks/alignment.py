"""Time, memory and error of scoring all pairs, over regions M, nodes K, captions C and backends.

    python benchmarks/alignment.py           # on a GPU: 512 images against 4,096 captions, as one rank of eight has
    python benchmarks/alignment.py --tiny    # a few seconds on a CPU: shows that it works, measures nothing

Writes a JSON file, a Markdown table and a plot (the paper's "time against number of masks", with the exact kernel), all
of them anew after every sweep. What fails or does not fit is a row that says so.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measure import RESULTS, markdown, measure, origin, run, write_result
from torch import Tensor

from powerclip.alignment.backends import triton_obstacle
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.ragged import Segments
from powerclip.alignment.score import score_all

MOST_ENUMERATED = 2**35  # most similarities of sets by the reference; beyond, it is left out as too slow
ROW_SECONDS = 0.4  # of repetitions; what takes longer is repeated twice
# Where what takes long to compile is measured: inductor takes 10 to 20 s for each number of regions and, apart from the
# others, for the gradient.
COMPILED_AT = {"nla": (5, 10, 16), "nla + gradient": (10,)}
GRADIENT_AT = (5, 10, 12, 16)

SETTINGS: dict[str, dict[str, Any]] = {
    "nla": {},
    "exact": {"aggregation": "exact"},
    "cosine": {"aggregation": "exact", "similarity": "cosine", "largest_set": 0},
}
SCORES = tuple(f"{name}{gradient}" for name in SETTINGS for gradient in ("", " + gradient"))
WHATS = ("gemm", *SCORES)
BACKENDS = ("reference", "torch", "triton")


@dataclass(frozen=True)
class Size:
    images: int
    captions: int
    regions: int  # M
    nodes: int  # mean K; trees have 1 … 2K−1 nodes
    width: int


BASE = Size(512, 4096, 10, 10, 512)


@dataclass(frozen=True)
class Row:
    sweep: str
    what: str  # one of WHATS
    backend: str
    dtype: str
    size: Size
    ms: float | None = None
    spread: float | None = None
    gib: float | None = None
    error: float | None = None  # largest against float64, relative to the largest score
    target: str = ""  # that this row was to reach, and whether it did
    note: str = ""


@dataclass(frozen=True)
class Limits:
    repeats: int
    max_similarities: int  # of sets
    until: float = math.inf  # no row is begun later, on the monotonic clock

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until


class Sweep(NamedTuple):
    name: str
    sizes: tuple[Size, ...]
    compiled: bool = False  # of the backend `torch`; the other backends have another sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, two repetitions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row later; it is noted as left out")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    base = Size(16, 24, 4, 3, 32) if arguments.tiny else BASE
    limits = Limits(arguments.repeats, MOST_ENUMERATED, time.monotonic() + arguments.seconds)
    if arguments.tiny:
        limits = replace(limits, repeats=2, max_similarities=2**22)
    name = "alignment-tiny" if arguments.tiny else f"alignment-{device.type}"
    save = functools.partial(report, base, arguments.output, name, origin())
    # Ended by a time limit it writes what it has, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows: list[Row] = []
    try:
        for sweep in sweeps(base, tiny=arguments.tiny):
            for size in sweep.sizes:
                for row in measured(sweep, size, device, limits):
                    print(" | ".join(cells(row)), flush=True)
                    rows.append(row)
            print(f"{save(rows)}.json, .md, .png", flush=True)
    except BaseException:
        if rows:
            save(rows)
        raise


def sweeps(base: Size, *, tiny: bool) -> tuple[Sweep, ...]:
    """In the order in which they run: what is slow to compile comes last, where a time limit may leave it out."""
    regions, compiled, nodes, captions = (
        ((3, 4, 17, 18), (3, 4), (2, 5), (16, 32))
        if tiny
        else ((5, 8, 10, 12, 14, 16, 20, 24), COMPILED_AT["nla"], (5, 20, 40), (1024, 8192, 32768))
    )
    return (
        Sweep("K", tuple(replace(base, nodes=k) for k in nodes)),
        Sweep("C", tuple(replace(base, captions=c) for c in captions)),
        Sweep("M", tuple(replace(base, regions=m) for m in regions)),
        Sweep("M", tuple(replace(base, regions=m) for m in compiled), compiled=True),
    )


def measured(sweep: Sweep, size: Size, device: torch.device, limits: Limits) -> Iterator[Row]:
    """One row for each operator and backend at this size."""
    regions, nodes, segments = example(size, device)

    def tried(row: Row, run: Callable[[], object], check: Callable[[], float] | None = None) -> Row:
        if limits.over:
            return replace(row, note="left out: no time")
        return timed(row, run, check, device, limits.repeats)

    if not sweep.compiled:
        by_region, half = regions.bfloat16().flatten(0, 1), nodes.bfloat16()
        yield tried(Row(sweep.name, "gemm", "torch", "bf16", size), lambda: half @ by_region.T)
    for what, backend in variants(sweep, size):
        config = AlignmentConfig(**SETTINGS[what.split()[0]], backend=backend)
        row = Row(sweep.name, what, backend, "float32", size)
        obstacle = left_out(config, size, len(nodes), device, limits.max_similarities)
        if obstacle:
            yield replace(row, note=obstacle)
            continue
        inputs = regions, nodes, segments, config
        score = with_gradient if "gradient" in what else plain
        yield judged(tried(row, functools.partial(score, *inputs), functools.partial(error, *inputs)))


def variants(sweep: Sweep, size: Size) -> Iterator[tuple[str, str]]:
    """What is measured of a sweep at this size: what, backend."""
    large = size.images == BASE.images
    for what, backend in itertools.product(SCORES, BACKENDS):
        if (backend == "torch") != sweep.compiled:
            continue
        if large and "gradient" in what and size.regions not in GRADIENT_AT:
            continue
        if large and backend == "reference" and what in ("exact + gradient", "cosine", "cosine + gradient"):
            continue  # what autograd keeps of all sets does not fit
        if large and backend == "torch" and size.regions not in COMPILED_AT.get(what, COMPILED_AT["nla"]):
            continue
        yield what, backend


def example(size: Size, device: torch.device) -> tuple[Tensor, Tensor, Segments]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * size.nodes, (size.captions,), generator=generator)
    generator = torch.Generator(device).manual_seed(0)  # 32,768 captions' nodes would take a CPU seconds
    regions = torch.randn(size.images, size.regions, size.width, generator=generator, device=device)
    nodes = torch.randn(int(lengths.sum()), size.width, generator=generator, device=device)
    return F.normalize(regions, dim=-1), F.normalize(nodes, dim=-1), Segments.from_lengths(lengths.to(device))


def left_out(config: AlignmentConfig, size: Size, nodes: int, device: torch.device, max_similarities: int) -> str:
    """Why a variant is not measured; empty when it is."""
    if config.backend == "triton":
        if device.type != "cuda":
            return "needs a GPU"
        if config.aggregation == "exact" and size.regions > 16:
            return "at most 16 regions"
        return triton_obstacle(config, device) or ""
    if config.aggregation == "exact":
        if config.backend == "torch" and device.type == "cuda":
            return "not compiled"  # it is the reference then
        if nodes * size.images * 2**size.regions > max_similarities:
            return "too slow"
    return ""


def plain(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> None:
    with torch.no_grad():
        score_all(regions, nodes, segments, config)


def with_gradient(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> None:
    regions, nodes = regions.detach().requires_grad_(), nodes.detach().requires_grad_()
    score_all(regions, nodes, segments, config).sum().backward()


@torch.no_grad()
def error(regions: Tensor, nodes: Tensor, segments: Segments, config: AlignmentConfig) -> float:
    """The error of the scores of the first images and captions."""
    lengths = segments.lengths[:16]
    # 16 images: Triton compiles anew for a number that 16 does not divide.
    regions, nodes = regions[:16], nodes[: int(lengths.sum())]
    part = Segments.from_lengths(lengths)
    exact = score_all(regions.double(), nodes.double(), part, replace(config, backend="reference"))
    return float((score_all(regions, nodes, part, config) - exact).abs().max() / exact.abs().max())


def timed(
    row: Row, run: Callable[[], object], check: Callable[[], float] | None, device: torch.device, repeats: int
) -> Row:
    """The row with its measurement, or with why there is none."""
    note = ""
    try:
        run()  # compiles
        began = synced_time(device)
        run()
        measured = measure(
            run, device, max(2, min(repeats, int(ROW_SECONDS / (synced_time(device) - began)))), warmup=0
        )
        row = replace(row, ms=measured.ms, spread=measured.spread, gib=measured.gib)
        return row if check is None else replace(row, error=check())
    except Exception as problem:
        note = failure(problem)
    # Outside of the except block: the exception's frames held tensors.
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return replace(row, note=note)


def synced_time(device: torch.device) -> float:
    """The time after a device sync."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def failure(problem: BaseException) -> str:
    """What went wrong, in at most 80 characters that fit into a table."""
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    first = next(iter(str(problem).strip().splitlines()), "")
    return f"{type(problem).__name__}: {first}".replace("|", "/")[:80]


def judged(row: Row) -> Row:
    """The row beside the targets of the exact kernels on an H200; a gradient's includes its forward."""
    if row.backend != "triton" or row.note.startswith("left out"):
        return row
    targets = {
        ("exact", BASE): ("≤ 3.5 ms", row.ms is not None and row.ms <= 3.5),
        ("exact + gradient", BASE): ("≤ 11.5 ms", row.ms is not None and row.ms <= 11.5),
        ("exact", replace(BASE, regions=14)): ("runs", row.ms is not None),
    }
    if (row.what, row.size) not in targets:
        return row
    target, met = targets[row.what, row.size]
    return replace(row, target=f"{target}: {'met' if met else 'missed'}")


HEADS = ["sweep", "what", "backend", "dtype", "C", "M", "K", "ms", "±", "GiB", "error", "target", "note"]


def cells(row: Row) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    named = [row.sweep, row.what, row.backend, row.dtype, row.size.captions, row.size.regions, row.size.nodes]
    values = [number(row.ms, ".3g"), number(row.spread, ".2g"), number(row.gib, ".2f"), number(row.error, ".0e")]
    return [*map(str, named), *values, row.target, row.note]


def report(base: Size, folder: Path, name: str, provenance: dict[str, str], rows: Sequence[Row]) -> Path:
    """Write all rows so far; gives the path without its ending."""

    def order(row: Row) -> tuple[Any, ...]:
        size = row.size.regions, row.size.nodes, row.size.captions
        return "MKC".index(row.sweep), *size, WHATS.index(row.what), BACKENDS.index(row.backend)

    rows = sorted(rows, key=order)
    text = f"# Scoring all pairs\n\n{base.images} images, D = {base.width}; error relative to the largest score; "
    text += "gemm: the bare product of nodes and regions\n\n"
    text += markdown([cells(row) for row in rows], HEADS)
    path = write_result(folder, name, provenance, {"rows": [asdict(row) for row in rows]}, text)
    plot(rows, base, provenance["machine"], path.with_suffix(".png"))
    return path


class Line(NamedTuple):
    what: str
    backend: str
    dtype: str
    label: str
    colour: str
    style: str = "o-"


# Approximations blue, what enumerates sets orange, by cosine violet, from the plainest to the kernels.
LINES = (
    Line("exact", "reference", "float32", "exact, sets enumerated", "#e6a15c", "s--"),
    Line("cosine + gradient", "triton", "float32", "cosine and gradient, kernel", "#8a3fa0", "^-"),
    Line("cosine", "triton", "float32", "cosine, kernel", "#b57fc6"),
    Line("exact + gradient", "triton", "float32", "exact and gradient, kernel", "#7c2d12", "^-"),
    Line("exact", "triton", "float32", "exact, kernel", "#c2410c"),
    Line("nla", "reference", "float32", "NLA, formulas", "#8fb8e8", "s--"),
    Line("nla", "torch", "float32", "NLA, compiled", "#5b8fd0", "^--"),
    Line("nla", "triton", "float32", "NLA, kernel", "#1f5fbf"),
    Line("gemm", "torch", "bf16", "bare product, bf16", "#8a8f98", ":"),
)


def plot(rows: Sequence[Row], base: Size, where: str, path: Path) -> None:
    """Time against the number of regions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    drawn_at: set[int] = set()
    ends: list[tuple[float, Any]] = []
    for line in LINES:
        key = ("M", line.what, line.backend, line.dtype)
        points = [
            (row.size.regions, row.ms)
            for row in sorted(rows, key=lambda row: row.size.regions)
            if (row.sweep, row.what, row.backend, row.dtype) == key and row.ms is not None
        ]
        if not points:
            continue
        drawn_at |= {regions for regions, _ in points}
        xs, ys = zip(*points, strict=True)
        (curve,) = axes.plot(xs, ys, line.style, color=line.colour, markersize=4.5, lw=1.6, label=line.label)
        ends.append((ys[-1], curve))
    axes.set_xlabel("regions of an image, M")
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if _decades(ends) < 2 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sorted(drawn_at))
    axes.grid(axis="y", color="#e3e5e8", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    title = f"Time to score {base.images:,} images × {base.captions:,} captions against the number of regions"
    axes.set_title(title, fontsize=11, loc="left", pad=22)
    axes.text(
        0, 1.025, f"{base.nodes} nodes a caption, D = {base.width} · {where}", transform=axes.transAxes, fontsize=8.5
    )
    # Beside the axes, in the order of the lines' right ends: no label lies on a line.
    handles = [curve for _, curve in sorted(ends, key=lambda end: -end[0])]
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _decades(ends: Sequence[tuple[float, Any]]) -> float:
    values = [float(y) for _, curve in ends for y in curve.get_ydata()]
    return math.log10(max(values) / min(values)) if values else 0.0


if __name__ == "__main__":
    run(main)
