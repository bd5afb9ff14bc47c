"""How fast a segmenter is, how many masks it finds, and how large they are, over the images of shards.

    python benchmarks/segmenters.py $POWERCLIP_DATA/captions10k/train-*.tar --weights mobile_sam.pt  # on a GPU
    python benchmarks/segmenters.py SHARD.tar --segmenter superpixels --limit 200                    # on a CPU

Images are read before the clock starts; what is timed is `Segmenter.segment` on batches of them, with packing of the
masks as `powerclip annotate` stores them. With `--points 16,32` each grid is measured in turn, with `--seconds` each
stops at that time. Writes a JSON file and a Markdown table.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import RESULTS, markdown, origin, run, write_result

from powerclip.annotate.segmenters import Segmenter, SegmenterImage, load_segmenter
from powerclip.data.decode import decode_rgb
from powerclip.data.mask_codec import LARGEST, pack_mask
from powerclip.data.tar_index import make_index

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
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    images = list(itertools.islice(read_images(arguments.shards), arguments.limit))
    results = []
    for points in map(int, arguments.points.split(",")):
        options = {} if arguments.segmenter == "superpixels" else {"points": points}
        segmenter = load_segmenter(arguments.segmenter, arguments.device, arguments.weights, **options)
        segmenter.segment(images[: arguments.batch])
        results.append(measure_segmenter(segmenter, images, arguments.batch, arguments.seconds))
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


def measure_segmenter(
    segmenter: Segmenter, images: Sequence[SegmenterImage], batch: int, seconds: float
) -> dict[str, Any]:
    counts: list[int] = []
    areas: list[float] = []
    sizes: list[int] = []
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for first in range(0, len(images), batch):
        for masks in segmenter.segment(images[first : first + batch]):
            counts.append(len(masks))
            areas += masks.mean((1, 2)).tolist()
            sizes += [len(pack_mask(mask)) for mask in masks]
        if time.perf_counter() - began > seconds:
            break
    elapsed = time.perf_counter() - began
    return {
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


def _show(value: object) -> str:
    if isinstance(value, list):
        return " · ".join(_show(one) for one in value)
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run(main)
