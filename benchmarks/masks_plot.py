"""Draw what segmenters find: python benchmarks/masks_plot.py --weights mobile_sam.pt docs/images/masks.png

Four images that scikit-image ships, free of rights (astronaut: NASA, public domain; coffee: Rachel Michetti, chelsea:
Stéfan van der Walt, rocket: SpaceX, all CC0), and over each its masks as a sidecar stores them, packed and unpacked.
"""

from __future__ import annotations

import argparse
import colorsys
import time
from pathlib import Path

import numpy as np
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from skimage import data

from powerclip.annotate.segmenters import Masks, SegmenterImage, load_segmenter
from powerclip.data.mask_codec import pack_mask, unpack_masks

NAMES = ("astronaut", "coffee", "chelsea", "rocket")
HEIGHT, GAP, HEAD = 190, 6, 20  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()

    images = [SegmenterImage(name, getattr(data, name)()) for name in NAMES]
    rows = [("", [shown(image, None) for image in images])]
    for title, segmenter in (
        ("MobileSAM, 16 × 16 points", load_segmenter("mobile_sam", arguments.device, arguments.weights)),
        ("superpixels", load_segmenter("superpixels")),
    ):
        cells = []
        for image in images:
            began = time.perf_counter()
            (masks,) = segmenter.segment([image])
            seconds = time.perf_counter() - began
            packed = [pack_mask(mask) for mask in masks]
            size = sum(map(len, packed))
            print(
                f"{title}: {image.key}: {len(masks)} masks, {size} bytes, {seconds:.1f} s; share of the image: "
                + " ".join(f"{100 * mask.mean():.1f}" for mask in masks)
            )
            cells.append(shown(image, unpack_masks(packed)))
        rows.append((title, cells))
    sheet(rows).quantize(256, dither=Image.Dither.NONE).save(arguments.output, optimize=True)


def shown(source: SegmenterImage, masks: Masks | None) -> Image.Image:
    """The image, with each mask in its own colour over it; small ones over large ones."""
    image = Image.fromarray(source.pixels)
    image = image.resize((round(image.width * HEIGHT / image.height), HEIGHT), Image.Resampling.LANCZOS)
    if masks is None:
        return image
    pixels = np.asarray(image).astype(float) * 0.75
    for number, mask in enumerate(sorted(masks, key=np.sum, reverse=True)):
        grown = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST))
        colour = 255 * np.array(colorsys.hsv_to_rgb(number * 0.381966 % 1, 0.75, 1))  # golden steps around the circle
        pixels[grown] = 0.55 * pixels[grown] + 0.45 * colour
        padded = np.pad(grown, 1)
        inner = padded[2:, 1:-1] & padded[:-2, 1:-1] & padded[1:-1, 2:] & padded[1:-1, :-2]
        pixels[grown & ~inner] = colour
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def sheet(rows: list[tuple[str, list[Image.Image]]]) -> Image.Image:
    width = sum(cell.width + GAP for cell in rows[0][1]) - GAP
    height = sum(HEIGHT + GAP + (HEAD if title else 0) for title, _ in rows) - GAP
    page = Image.new("RGB", (width, height), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.truetype(findfont("DejaVu Sans"), 12)
    top = 0
    for title, cells in rows:
        if title:
            pen.text((0, top + 1), title, "black", font)
            top += HEAD
        left = 0
        for cell in cells:
            page.paste(cell, (left, top))
            left += cell.width + GAP
        top += HEIGHT + GAP
    return page


if __name__ == "__main__":
    main()
