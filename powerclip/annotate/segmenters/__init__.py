"""Segmenters of images behind one interface: `load_segmenter("superpixels").segment(images)`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from powerclip.annotate.segmenters.base import Masks, Segmenter, SegmenterImage
from powerclip.errors import UserError, nearest
from powerclip.runtime.distributed import choose_device

SEGMENTERS = ["superpixels", "mobile_sam", "sam2", "coco"]


def load_segmenter(
    name: str = "superpixels", device: str = "auto", weights: str | None = None, **options: Any
) -> Segmenter:
    """The segmenter called `name`, ready to segment.

    Args:
        name: `superpixels` (needs nothing), `mobile_sam`, `sam2` (extra `sam`) or `coco`.
        device: where it computes: `cpu`, `cuda`, `cuda:1`, or `auto` for a GPU when there is one.
        weights: MobileSAM's weights file; SAM 2's name on the hub or its folder; the JSON file with COCO's masks.
        options: what else the segmenter takes.

    Raises:
        UserError: no segmenter has this name, an option is unknown or out of range, or a file or library is missing.
    """
    if name not in SEGMENTERS:
        hint = nearest(name, SEGMENTERS)
        raise UserError(f"no segmenter is called {name!r}{hint}; there are {', '.join(SEGMENTERS)}")
    if name == "superpixels":
        from powerclip.annotate.segmenters.superpixels import SuperpixelOptions, Superpixels

        if weights is not None:
            raise UserError(
                f"segmenter superpixels takes no weights: name the one that {weights} is for with --segmenter"
            )
        _check(name, options, SuperpixelOptions)
        return Superpixels(**options)
    if name == "coco":
        from powerclip.annotate.segmenters.coco import CocoMasks

        _check(name, options)
        return CocoMasks(None if weights is None else Path(weights))
    from powerclip.annotate.segmenters.points import PointOptions

    _check(name, {key: value for key, value in options.items() if key != "fast"}, PointOptions)
    if not isinstance(options.get("fast", False), bool):
        raise UserError(f"segmenter {name}: fast is true or false, not {options['fast']!r}")
    torch_device = choose_device(device, setting="--device")
    if name == "mobile_sam":
        from powerclip.annotate.segmenters.mobile_sam import MobileSam

        return MobileSam(None if weights is None else Path(weights), torch_device, **options)
    from powerclip.annotate.segmenters.sam2 import Sam2

    return Sam2(weights, torch_device, **options)


def _check(name: str, options: dict[str, Any], takes: type | None = None) -> None:
    known = list(inspect.signature(takes).parameters) if takes else []
    for option in options:
        if option not in known:
            listed = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UserError(f"segmenter {name} has no option {option!r}{nearest(option, known)}; {listed}")


__all__ = ["SEGMENTERS", "Masks", "Segmenter", "SegmenterImage", "load_segmenter"]
