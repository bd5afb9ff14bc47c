"""Samples a second from shards to batches: ours against open_clip's own loader, on the same tars, cores and workers.

    python benchmarks/data.py                           # images and captions of $POWERCLIP_DATA/captions10k
    python benchmarks/data.py --memory 200000           # resident memory over so many samples as well
    python benchmarks/data.py --tiny                    # a few seconds: shows that it works, measures nothing

Both read tars of .jpg and .txt, crop at random (at least 90 % of the area), resize to 224² and hand over normalised
float32 batches on the CPU. open_clip's gives images and tokens; ours M = 10 regions and the phrases of trees as well.
Images are those of captions10k (128²), and the same ones enlarged, with noise, to 512 × 384 and 1024 × 768, as large
as web crawls keep them. Without the data set they are noise. The loaders take turns. "bytes" is ours before pixels are
normalised, which training on a GPU leaves to the GPU.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import importlib.util
import inspect
import io
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from measure import RESULTS, markdown, origin, run, write_result
from PIL import Image

from powerclip.annotate.writer import RegionRows, TreeRows, write_sidecar
from powerclip.data.batch import BatchSpec
from powerclip.data.captions import content_hash, read_captions
from powerclip.data.mask_codec import GRID, pack_mask
from powerclip.data.shard_loader import ShardLoader, ShardOptions
from powerclip.data.shards import open_shards
from powerclip.data.sidecar import Annotator, SidecarInfo, sidecar_path
from powerclip.data.tar_index import make_index
from powerclip.data.tokens import CaptionTokenizer
from powerclip.data.trees import Span, parse_bracketed
from powerclip.errors import UserError
from powerclip.train.statistics import resident_bytes

SIZE, GRID_PATCHES = (224, 224), (14, 14)
CROP = 0.9
KINDS = ["128×128", "512×384", "1024×768"]
MASKS = 20  # of each image; about what a segmenter finds

Pair = tuple[str, bytes, str, list[Span]]  # key, image, caption, phrases


@dataclass
class Row:
    images: str
    loader: str
    samples_per_second: list[float]
    cpu_ms: list[float]  # of all processes together, a sample
    relative: float = 0.0  # samples/s to open_clip's, medians
    relative_cpu: float = 0.0  # the same from CPU time: what busy cores leave of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few images, one round")
    parser.add_argument("--samples", type=int, default=4000, help="measured in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS, help="sizes of images")
    parser.add_argument("--memory", type=int, default=0, help="samples of a long run whose memory is watched")
    parser.add_argument("--shards", type=Path, help="folder for the shards; existing ones are used again")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.samples, arguments.rounds, arguments.batch, arguments.only = 16, 1, 4, KINDS[:1]
    provenance = origin()
    torch.set_num_threads(1)  # the workers have the cores
    rows: list[Row] = []
    memory: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.shards or Path(temporary)
        paths = {kind: prepare(folder / kind, kind, arguments) for kind in arguments.only}
        if arguments.rounds:
            rows = [row for kind, path in paths.items() for row in compare(kind, path, arguments)]
        if arguments.memory or arguments.tiny:
            memory = watch_memory(paths[arguments.only[0]], arguments)
    write(rows, memory, provenance, arguments)


# ---- shards to read --------------------------------------------------------------------------------------------------


def prepare(folder: Path, kind: str, arguments: argparse.Namespace) -> Path:
    """The shards of images of that size, made unless they exist."""
    if not folder.exists():
        width, height = map(int, kind.split("×"))
        pairs = list(read_pairs(64 if arguments.tiny else 4000 if width < 1000 else 2000))
        size = write_shards(folder, pairs, (width, height), shards=2 * arguments.workers)
        print(f"{kind}: {len(pairs):,} images of {size / 1000:.0f} kB", flush=True)
    return folder


def read_pairs(count: int) -> Iterator[Pair]:
    """Images and captions with the phrases of their trees."""
    data = os.environ.get("POWERCLIP_DATA")
    if not data:
        yield from made_up(count)
        return
    folder = Path(data) / "captions10k"
    with gzip.open(folder / "trees.tsv.gz", "rt", encoding="utf-8") as lines:
        brackets = {(key, number): tree for key, number, tree in (line.rstrip("\n").split("\t") for line in lines)}
    for path in sorted(folder.glob("train-*.tar")):
        index, content = make_index(path), path.read_bytes()
        for number, key in enumerate(index.keys):
            (extent, suffix), *_ = index.caption_files(number)
            caption = read_captions(content[extent.offset : extent.offset + extent.size], suffix)[0]
            try:
                spans = list(parse_bracketed(brackets[key, "0"], caption).nodes)
            except (UserError, KeyError):
                continue
            offset, size = index.image(number)
            yield key, content[offset : offset + size], caption, spans
            count -= 1
            if not count:
                return


def made_up(count: int) -> Iterator[Pair]:
    caption = "a dog sitting on a red chair"
    spans = list(parse_bracketed("(NP (NP a dog) (VP sitting (PP on (NP a red chair))))", caption).nodes)
    random = np.random.default_rng(0)
    for number in range(count):
        yield f"x{number:06d}", jpeg(random.integers(0, 255, (128, 128, 3), np.uint8), 80), caption, spans


def write_shards(folder: Path, pairs: list[Pair], shape: tuple[int, int], shards: int) -> float:
    """Tars of .jpg and .txt with trees and masks beside them; gives the mean size of an image in bytes."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    sizes = []
    for number in range(shards):
        path = folder / f"{number:05d}.tar"
        trees, regions = TreeRows(), RegionRows()
        with tarfile.open(path, "w") as tar:
            for key, original, caption, spans in pairs[number::shards]:
                image = enlarge(original, shape, random)
                sizes.append(len(image))
                for name, data in ((f"{key}.jpg", image), (f"{key}.txt", caption.encode())):
                    entry = tarfile.TarInfo(name)
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
                for rows in (trees, regions):
                    rows.key.append(key)
                trees.caption.append([content_hash(caption)])
                trees.spans.append([spans])
                trees.fallback.append([None])
                regions.image.append(content_hash(image))
                regions.masks.append([pack_mask(ellipse(random)) for _ in range(MASKS)])
                regions.fallback.append(None)
        status = path.stat()
        info = Annotator("benchmark", "1"), path.name, f"{status.st_size}:{status.st_mtime_ns}", len(trees.key), 0
        write_sidecar(sidecar_path(path, "trees"), SidecarInfo("trees", *info), trees)
        write_sidecar(sidecar_path(path, "regions"), SidecarInfo("regions", *info), regions)
    return statistics.mean(sizes)


def enlarge(original: bytes, shape: tuple[int, int], random: np.random.Generator) -> bytes:
    """The image at another size, with some noise: what is only enlarged has too little detail to be slow."""
    with Image.open(io.BytesIO(original)) as image:
        if image.size == shape:
            return original
        pixels = np.asarray(image.convert("RGB").resize(shape, Image.Resampling.BICUBIC)).astype(np.float32)
    coarse = random.normal(0, 9, (shape[1] // 2, shape[0] // 2, 1)).repeat(2, 0).repeat(2, 1)
    return jpeg((pixels + coarse).clip(0, 255).astype(np.uint8), 85)


def jpeg(pixels: np.ndarray, quality: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "jpeg", quality=quality)
    return file.getvalue()


def ellipse(random: np.random.Generator) -> np.ndarray:
    rows, columns = np.mgrid[:GRID, :GRID]
    (y, x), (height, width) = random.uniform(0, GRID, 2), random.uniform(4, GRID / 2, 2)
    return ((rows - y) / height) ** 2 + ((columns - x) / width) ** 2 < 1


# ---- loaders ---------------------------------------------------------------------------------------------------------


def open_clip_loader() -> ModuleType:
    """open_clip's module of loaders, patched to run here: it needs pandas, and webdataset 0.2.86 or older."""
    import torchvision  # noqa: F401 (before there is a pandas that is none)

    # pandas reads CSV files, which there are none of.
    missing = importlib.util.find_spec("pandas") is None
    if missing:
        sys.modules["pandas"] = ModuleType("pandas")
    from open_clip_train import data

    if missing:
        del sys.modules["pandas"]
    # Newer versions mark the end of each tar with an empty entry, on which it fails.
    if "eof_value" in inspect.signature(data.tar_file_expander).parameters:
        data.tar_file_expander = functools.partial(data.tar_file_expander, eof_value=None)
    return data  # type: ignore[no-any-return]


def open_clip_batches(folder: Path, arguments: argparse.Namespace, batches: int) -> Iterable[object]:
    from open_clip import SimpleTokenizer
    from open_clip.transform import AugmentationCfg, image_transform

    shards = len(list(folder.glob("*.tar")))
    settings = SimpleNamespace(
        train_data=f"{folder}/{{00000..{shards - 1:05d}}}.tar",
        train_num_samples=batches * arguments.batch,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        seed=0,
        batch_size=arguments.batch,
        workers=arguments.workers,
        world_size=1,
    )
    transform = image_transform(SIZE, is_train=True, aug_cfg=AugmentationCfg(scale=(CROP, 1.0)))
    data_info = OPEN_CLIP.get_wds_dataset(settings, transform, is_train=True, tokenizer=SimpleTokenizer())
    return data_info.dataloader  # type: ignore[no-any-return]


def our_loader(folder: Path, arguments: argparse.Namespace, trees: bool, segments: bool) -> ShardLoader:
    spec = BatchSpec(
        image_size=SIZE,
        grid=GRID_PATCHES,
        batch_size=arguments.batch,
        crop=CROP,
        workers=arguments.workers,
        length_multiple=8,
    )
    options = ShardOptions(trees=trees, segments=segments)
    return ShardLoader(open_shards(sorted(folder.glob("*.tar"))), spec, CaptionTokenizer(), options)


def compare(kind: str, folder: Path, arguments: argparse.Namespace) -> list[Row]:
    """All loaders over the same shards, in turn."""
    tars = list(folder.glob("*.tar"))
    images = sum(len(make_index(path)) for path in tars)
    kind += f", {sum(path.stat().st_size for path in tars) / images / 1000:.0f} kB"
    count = -(-arguments.samples // arguments.batch)
    # One before the clock starts, and as many behind as workers make ahead: they never run out of work.
    batches = 1 + count + 2 * arguments.workers

    def ours(trees: bool, segments: bool) -> Callable[[], Iterable[object]]:
        return lambda: our_loader(folder, arguments, trees, segments).stream(0, batches)

    loaders: dict[str, Callable[[], Iterable[object]]] = {
        "open_clip: images, tokens": lambda: open_clip_batches(folder, arguments, batches),
        "ours: + random boxes": ours(False, False),
        "ours: + random boxes, phrases": ours(True, False),
        "ours: + masks, phrases": ours(True, True),
        "ours: + random boxes, phrases; bytes": lambda: our_loader(folder, arguments, True, False).raw_stream(
            0, batches
        ),
    }
    rows = [Row(kind, name, [], []) for name in loaders]
    for _ in range(arguments.rounds):
        for row, begin in zip(rows, loaders.values(), strict=True):
            seconds, cpu = timed(iter(begin()), count)
            row.samples_per_second.append(count * arguments.batch / seconds)
            row.cpu_ms.append(1000 * cpu / count / arguments.batch)
            print(
                f"{row.images:20} {row.loader:38} {row.samples_per_second[-1]:8.0f} samples/s"
                f" {row.cpu_ms[-1]:8.2f} ms CPU",
                flush=True,
            )
    for row in rows:
        median = statistics.median
        row.relative = median(row.samples_per_second) / median(rows[0].samples_per_second)
        row.relative_cpu = median(rows[0].cpu_ms) / median(row.cpu_ms)
    return rows


def timed(batches: Iterator[object], count: int) -> tuple[float, float]:
    """Seconds that `count` batches take, and CPU seconds of this process and its workers meanwhile.

    From the first batch on: starting processes and filling buffers is over.
    """
    next(batches)
    began, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        next(batches)
    return time.perf_counter() - began, cpu_seconds() - cpu


def cpu_seconds() -> float:
    seconds = time.process_time()  # finer than the kernel's ticks, in which a tiny run takes none
    for child in children():
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def watch_memory(folder: Path, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """MiB of this process and of its workers together, over a long run with masks and phrases."""
    samples = max(arguments.memory, 10 * arguments.batch)
    steps = samples // arguments.batch
    rows = []
    for step, _ in enumerate(our_loader(folder, arguments, True, True).stream(0, steps)):
        if step == steps - 1 or step % max(1, steps // 10) == 0:
            parent, workers = resident_bytes() or 0, sum(resident_bytes(child) or 0 for child in children())
            row = {"samples": (step + 1) * arguments.batch, "main": parent / 2**20, "workers": workers / 2**20}
            print("  ".join(f"{name} {value:,.0f}" for name, value in row.items()), flush=True)
            rows.append(row)
    return rows


def children() -> list[int]:
    import multiprocessing

    return [child.pid for child in multiprocessing.active_children() if child.pid]


def write(
    rows: list[Row], memory: list[dict[str, float]], provenance: dict[str, str], arguments: argparse.Namespace
) -> None:
    heads = ["images", "loader", "samples/s", "rounds", "× open_clip", "CPU ms a sample", "× open_clip"]
    table = [
        [
            row.images,
            row.loader,
            f"{statistics.median(row.samples_per_second):,.0f}",
            " ".join(f"{rate:,.0f}" for rate in row.samples_per_second),
            f"{row.relative:.2f}",
            f"{statistics.median(row.cpu_ms):.2f}",
            f"{row.relative_cpu:.2f}",
        ]
        for row in rows
    ]
    text = (
        f"# From shards to batches\n\n{arguments.workers} workers, batches of {arguments.batch}, crops of {SIZE[0]}²."
    )
    if rows:
        text += f" {arguments.samples:,} samples a round.\n\n{markdown(table, heads)}"
    if memory:
        lines = [[f"{row['samples']:,.0f}", f"{row['main']:,.0f}", f"{row['workers']:,.0f}"] for row in memory]
        text += "\n\nResident memory in MiB, with masks and phrases:\n\n"
        text += markdown(lines, ["samples", "main process", "workers together"])
    # A part is a result of its own.
    part = "" if arguments.only == KINDS else "-" + "-".join(arguments.only).replace("×", "x") if rows else "-memory"
    name = "data-tiny" if arguments.tiny else f"data{part}-cpu"
    path = write_result(
        arguments.output, name, provenance, {"rows": [asdict(row) for row in rows], "memory": memory}, text
    )
    print(text, f"\nwritten to {path}.md", sep="\n")


OPEN_CLIP = open_clip_loader()

if __name__ == "__main__":
    run(main)
