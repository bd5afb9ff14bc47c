"""Time, memory and error of scoring all pairs, over regions M, nodes K, captions C and backends.

    python benchmarks/alignment.py           # on a GPU: 512 images against 4,096 captions, as one rank of eight has
    python benchmarks/alignment.py --tiny    # a few seconds on a CPU: shows that it works, measures nothing

Writes a JSON file, a Markdown table and a plot (the paper's "time against number of masks", with the exact kernel).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import RESULTS, markdown, measure, origin, write_result
from torch import Tensor

from powerclip.alignment.backends import triton_obstacle
from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.monte_carlo import monte_carlo_r2t
from powerclip.alignment.ragged import Segments
from powerclip.alignment.score import score_all

MOST_ENUMERATED = 2**36  # similarities of sets that the reference is asked for; beyond, it is left out as too slow
DRAWN_SETS = 1024


@dataclass(frozen=True)
class Size:
    images: int
    captions: int
    regions: int  # M
    nodes: int  # mean K; trees have 1 … 2K−1 nodes
    width: int


@dataclass(frozen=True)
class Row:
    sweep: str
    what: str  # gemm, nla, nla + gradient, exact, monte carlo
    backend: str
    dtype: str
    size: Size
    ms: float | None = None
    spread: float | None = None
    gib: float | None = None
    error: float | None = None  # largest, relative to the largest score, against float64
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, two repetitions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.tiny:
        base, repeats, most = Size(16, 24, 4, 3, 32), 2, 2**22
        sweeps = {"M": (3, 4, 17), "K": (2, 5), "C": (16, 32)}
    else:
        base, repeats, most = Size(512, 4096, 10, 10, 512), arguments.repeats, MOST_ENUMERATED
        sweeps = {"M": (5, 6, 7, 8, 10, 12, 14, 16, 20), "K": (5, 20, 40), "C": (1024, 8192, 32768)}
    axis = {"M": "regions", "K": "nodes", "C": "captions"}
    rows: list[Row] = []
    for sweep, values in sweeps.items():
        for value in values:
            for row in measured(sweep, replace(base, **{axis[sweep]: value}), device, repeats, most):
                print(line(row), flush=True)
                rows.append(row)
    made = origin()
    text = f"# Scoring all pairs\n\n{base.images} images, D = {base.width}; error relative to the largest score\n\n"
    text += markdown([line(row).split(" | ") for row in rows], HEADS)
    name = "alignment-tiny" if arguments.tiny else f"alignment-{device.type}"
    path = write_result(arguments.output, name, made, {"rows": [asdict(row) for row in rows]}, text)
    plot(rows, made["machine"], path.with_suffix(".png"))
    print(f"{path}.json, .md, .png")


def measured(sweep: str, size: Size, device: torch.device, repeats: int, most: int) -> Iterator[Row]:
    """One row for each way to score at this size."""
    regions, nodes, segments = example(size, device)
    by_region = regions.bfloat16().flatten(0, 1)
    half = nodes.bfloat16()
    gemm = Row(sweep, "gemm", "torch", "bf16", size)
    yield timed(gemm, lambda: half @ by_region.T, device, repeats)
    for what in ("nla", "nla + gradient", "exact"):
        aggregation = "exact" if what == "exact" else "nla"
        for backend in ("reference", "torch", "triton"):
            config = AlignmentConfig(aggregation=aggregation, backend=backend)
            for dtype in (torch.float32, torch.bfloat16):
                if dtype == torch.bfloat16 and (backend, what) != ("triton", "nla"):
                    continue
                row = Row(sweep, what, backend, str(dtype).removeprefix("torch."), size)
                obstacle = left_out(config, size, len(nodes), device, most)
                if obstacle:
                    yield replace(row, note=obstacle)
                    continue
                inputs = regions.to(dtype), nodes.to(dtype)
                run = functools.partial(with_gradient if "gradient" in what else plain, *inputs, segments, config)
                row = timed(row, run, device, repeats)
                yield row if row.ms is None else replace(row, error=error(*inputs, segments, config))
    if size.regions > 16:
        q = torch.einsum("bmd,td->tbm", regions[:8], nodes)
        row = Row(sweep, "monte carlo", "torch", "float32", size, note=f"{DRAWN_SETS} sets, 8 images only")
        yield timed(row, lambda: monte_carlo_r2t(q, segments, DRAWN_SETS), device, repeats)


def example(size: Size, device: torch.device) -> tuple[Tensor, Tensor, Segments]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * size.nodes, (size.captions,), generator=generator)
    regions = F.normalize(torch.randn(size.images, size.regions, size.width, generator=generator), dim=-1)
    nodes = F.normalize(torch.randn(int(lengths.sum()), size.width, generator=generator), dim=-1)
    return regions.to(device), nodes.to(device), Segments.from_lengths(lengths.to(device))


def left_out(config: AlignmentConfig, size: Size, nodes: int, device: torch.device, most: int) -> str:
    """Why a way to score is not measured; empty when it is."""
    if config.backend == "triton":
        if device.type != "cuda":
            return "needs a GPU"
        if config.aggregation == "exact" and size.regions > 16:
            return "at most 16 regions"
        return triton_obstacle(config, device) or ""
    if config.aggregation == "exact" and nodes * size.images * 2**size.regions > most:
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
    """On the first images and captions."""
    lengths = segments.lengths[:16]
    few, some = regions[:8], nodes[: int(lengths.sum())]
    part = Segments.from_lengths(lengths)
    exact = score_all(few.double(), some.double(), part, replace(config, backend="reference"))
    return float((score_all(few, some, part, config) - exact).abs().max() / exact.abs().max())


def timed(row: Row, run: Callable[[], object], device: torch.device, repeats: int) -> Row:
    try:
        found = measure(run, device, repeats, warmup=2)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return replace(row, note="out of memory")
    return replace(row, ms=found.ms, spread=found.spread, gib=found.gib)


HEADS = ("sweep", "what", "backend", "dtype", "C", "M", "K", "ms", "±", "GiB", "error", "note")


def line(row: Row) -> str:
    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    cells = [row.sweep, row.what, row.backend, row.dtype, row.size.captions, row.size.regions, row.size.nodes]
    cells += [number(row.ms, ".3g"), number(row.spread, ".2g"), number(row.gib, ".2f"), number(row.error, ".0e")]
    return " | ".join(map(str, [*cells, row.note]))


def plot(rows: list[Row], where: str, path: Path) -> None:
    """Time against the number of regions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row.sweep == "M" and row.ms is not None and row.what != "monte carlo":
            lines.setdefault(f"{row.what}, {row.backend} ({row.dtype})", []).append(row)
    for label, points in lines.items():
        axes.plot([p.size.regions for p in points], [p.ms for p in points], marker="o", markersize=3, label=label)
    size = rows[0].size
    axes.set(xlabel="regions M", ylabel="ms", yscale="log")
    axes.set_title(f"{size.images} images × {size.captions} captions, K ≈ {size.nodes}\n{where}", fontsize=9)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
