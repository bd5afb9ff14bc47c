"""How fast a segmenter is, how many masks it finds, and how large they are, over the images of shards.

    python benchmarks/segmenters.py $POWERCLIP_DATA/captions10k/train-*.tar --weights mobile_sam.pt  # on a GPU
    python benchmarks/segmenters.py … --weights mobile_sam.pt --float32 200    # and: are they the masks of float32?
    python benchmarks/segmenters.py SHARD.tar --segmenter superpixels --limit 200                    # on a CPU

Images are read before the clock starts; what is timed is the segmenter on batches of them, the next one begun before
the masks of one are fetched, as `powerclip annotate` does it, without the packing of masks, which it does beside.
`--float32 N` segments N images also by the plain decoder in float32, looks for each of its masks the one that overlaps
it most, and the other way round. With `--points 16,32` each grid is measured in turn, with `--seconds` each stops at
that time. Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import RESULTS, markdown, origin, run, write_result

from powerclip.annotate.segmenters import Masks, Segmenter, SegmenterImage, load_segmenter
from powerclip.annotate.segmenters.base import AsynchronousSegmenter
from powerclip.annotate.segmenters.mobile_sam import MobileSam
from powerclip.data.decode import decode_rgb
from powerclip.data.mask_codec import LARGEST, pack_mask
from powerclip.data.tar_index import make_index
from powerclip.errors import UserError
from powerclip.runtime.distributed import choose_device

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", nargs="+", type=Path)
    parser.add_argument("--segmenter", default="mobile_sam")
    parser.add_argument("--weights")
    parser.add_argument("--points", default="16", help="grids of points to measure: 8,16,32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--limit", type=int, help="most images to measure")
    parser.add_argument("--seconds", type=float, default=600, help="stop measuring a grid after this time")
    parser.add_argument(
        "--float32", type=int, default=0, metavar="N", help="compare the masks of N images with float32's"
    )
    parser.add_argument(
        "--fast", action="store_true", help="SAM by kernels: --set fast=true of powerclip annotate regions"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    images = list(itertools.islice(read_images(arguments.shards), arguments.limit))
    results = []
    for points in map(int, arguments.points.split(",")):
        options = {} if arguments.segmenter == "superpixels" else {"points": points}
        kernels = {"fast": True} if arguments.fast else {}
        segmenter = load_segmenter(arguments.segmenter, arguments.device, arguments.weights, **options, **kernels)
        segmenter.segment(images[: arguments.batch])
        row, masks = measure_segmenter(segmenter, images, arguments.batch, arguments.seconds)
        if arguments.float32:
            plain = load_plain(arguments, **options)
            row |= compare(plain, images[: arguments.float32], masks)
        results.append(row)
        print(markdown([list(results[-1].values())], list(results[-1])))
    provenance = origin()
    rows = [[_show(value) for value in result.values()] for result in results]
    text = f"# {arguments.segmenter}\n\n{markdown(rows, list(results[0]))}"
    print(write_result(arguments.output, f"segmenter-{arguments.segmenter}", provenance, {"results": results}, text))


def read_images(shards: Sequence[Path]) -> Iterator[SegmenterImage]:
    for shard in shards:
        index = make_index(shard)
        with open(shard, "rb") as file:
            for number, key in enumerate(index.keys):
                extent = index.image(number)
                file.seek(extent.offset)
                pixels = decode_rgb(file.read(extent.size))
                if pixels is not None:
                    yield SegmenterImage(key, pixels)


def segment(
    segmenter: Segmenter, images: Sequence[SegmenterImage], batch: int, seconds: float = float("inf")
) -> tuple[list[Masks], float]:
    """The masks of the images, as far as the time reaches, and the seconds that it took."""
    masks: list[Masks] = []
    waiting: Callable[[], list[Masks]] = list
    began = time.perf_counter()
    for first in range(0, len(images), batch):
        part = images[first : first + batch]
        if isinstance(segmenter, AsynchronousSegmenter):
            following = segmenter.submit(part)
            masks += waiting()
            waiting = following
        else:
            masks += segmenter.segment(part)
        if time.perf_counter() - began > seconds:
            break
    masks += waiting()
    return masks, time.perf_counter() - began


def measure_segmenter(
    segmenter: Segmenter, images: Sequence[SegmenterImage], batch: int, seconds: float
) -> tuple[dict[str, Any], list[Masks]]:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    found, elapsed = segment(segmenter, images, batch, seconds)
    counts = [len(masks) for masks in found]
    areas = [area for masks in found for area in masks.mean((1, 2)).tolist()]
    sizes = [len(pack_mask(mask)) for masks in found for mask in masks]
    row = {
        "points": segmenter.options.get("points", 0) ** 2,
        "images": len(counts),
        "images/s": len(counts) / elapsed,
        "masks/image": float(np.mean(counts)),
        "masks/image, 5 … 95 %": np.quantile(counts, QUANTILES).tolist(),
        "without a mask, %": 100 * float(np.mean(np.array(counts) == 0)),
        "area, % of image, 5 … 95 %": (100 * np.quantile(areas or [0.0], QUANTILES)).tolist(),
        "bytes/mask": float(np.mean(sizes or [0])),
        "largest mask, bytes": max(sizes, default=0),
        "stored coarsely, %": 100 * float(np.mean([size == 129 for size in sizes])) if sizes else 0.0,
        "bytes allowed": LARGEST,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }
    return row, found


def load_plain(arguments: argparse.Namespace, **options: Any) -> Segmenter:
    """The same segmenter without kernels and half precision."""
    if arguments.segmenter != "mobile_sam":
        raise UserError("--float32 compares the masks of --segmenter mobile_sam")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    weights = None if arguments.weights is None else Path(arguments.weights)
    return MobileSam(weights, choose_device(arguments.device), half=False, **options)


def compare(plain: Segmenter, images: Sequence[SegmenterImage], masks: Sequence[Masks]) -> dict[str, Any]:
    """How well the masks of the same images agree with those of `plain`: the mean IoU of each with its best match."""
    exact, elapsed = segment(plain, images, 4)
    pairs = [*zip(exact, masks, strict=False)]
    return {
        "compared images": len(pairs),
        "float32: images/s": len(exact) / elapsed,
        "IoU of float32's masks": float(np.mean([iou for one, other in pairs for iou in best_matches(one, other)])),
        "IoU with float32's masks": float(np.mean([iou for one, other in pairs for iou in best_matches(other, one)])),
    }


def best_matches(masks: Masks, others: Masks) -> list[float]:
    """The IoU of each mask with the one of `others` that overlaps it most."""
    return [max(((mask & one).sum() / (mask | one).sum() for one in others), default=0.0) for mask in masks]


def _show(value: object) -> str:
    if isinstance(value, list):
        return " · ".join(_show(one) for one in value)
    return (f"{value:,.1f}" if value > 1 else f"{value:.4f}") if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run(main)
