"""What `powerclip detect evaluate` measures: AP50 beside Table 15's, or how gold boxes are named, as tables and files.

Files have the schema of every evaluation, so that they can be read with the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from powerclip.detect.average_precision import AveragePrecision, average_precision, coco_results
from powerclip.detect.classes import Classes, embed_classes, ov_coco
from powerclip.detect.data import BoxSet
from powerclip.detect.naming import name_by_detector, name_gold_boxes
from powerclip.detect.predict import detect
from powerclip.detect.saved import is_detector, load_detector
from powerclip.detect.train import read_boxes
from powerclip.encoders import load
from powerclip.encoders.models import Blueprint
from powerclip.encoders.resolve import resolve
from powerclip.errors import UserError
from powerclip.evaluate.ground_figure import model_names
from powerclip.evaluate.paper_tables import published
from powerclip.report.table import Cell, Column, Row, Table, fixed, rank
from powerclip.runtime.distributed import choose_device
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import Progress

OV_COCO_IMAGES = 4000  # of its validation part there are 4,836; a part of them is another dataset
LONGER = 2  # an image's longer side in sides of the tower's own images, unless it is said


def default_size(towers: Blueprint) -> int:
    """Pixels of an image's longer side: twice those of the images that the tower was trained on."""
    size = towers.config.get("vision_cfg", {}).get("image_size", 224)
    return LONGER * (max(size) if isinstance(size, list | tuple) else size)


def evaluate_detection(
    model: str,
    data: str,
    images: Sequence[str] = (),
    *,
    gold_boxes: bool = False,
    scenes: int = 500,
    size: int | None = None,
    pretrained: str | None = None,
    output: Path | None = None,
    device: str = "auto",
    quiet: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure a detector, or with `gold_boxes` how it, or any model, names boxes that are given.

    Returns:
        The record that was written.

    Raises:
        UserError: no such model or data; AP50 was asked of a model that is no detector.
    """
    console = console or Console()
    name = model_names([model])[0]
    trained = is_detector(model)
    if not gold_boxes and not trained:
        raise UserError(
            f"{model} is no detector: `powerclip detect train -m {model}` makes one; --gold-boxes needs no training"
        )
    if trained and pretrained is not None:
        raise UserError("--pretrained belongs to an open_clip name: a detector brings its weights")
    if trained and size is not None:
        raise UserError("--size belongs to a model: a detector keeps the size that it was trained at")
    where = choose_device(device, setting="--device")
    boxes = read_boxes(data, list(images), scenes, "val")
    with Progress(name, len(boxes), unit="images", quiet=quiet, console=console, transient=True) as progress:
        for line in boxes.faults:
            progress.warn(line)
        if not quiet:
            progress.say(describe(boxes))
        about: dict[str, Any] = {"data": data, "images": len(boxes), "boxes": boxes.boxes, "faults": list(boxes.faults)}
        measure = _name if gold_boxes else _detect
        record, table, files = measure(model, pretrained, boxes, size, where, progress)
    kind = "gold boxes" if gold_boxes else "AP50"
    record = {
        "dataset": f"{_dataset(data, boxes)}{'_gold_boxes' if gold_boxes else ''}",
        "model": model,
        "task": "box_naming" if gold_boxes else "detection",
        **record,
        "powerclip": {**about, **record["powerclip"]},
    }
    folder = output or (Path(model) / "evaluation" if trained else Path("results") / name)
    written = folder / f"{record['dataset']}.json"
    write_atomic(written, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    for file, content in files.items():
        write_atomic(folder / file, content)
    if not quiet:
        table.print(console)
    console.print(f"{kind}: {written}", markup=False, highlight=False, soft_wrap=True)
    return record


def describe(boxes: BoxSet) -> str:
    """One line on what is there."""
    counts = boxes.counts()
    novel = torch.tensor(boxes.classes.novel)
    parts = [
        f"{int(counts[rows].sum()):,} of {int((counts[rows] > 0).sum())} {part} classes"
        for part, rows in (("base", ~novel), ("novel", novel))
    ]
    return f"{len(boxes):,} images; boxes: {' and '.join(parts)}; {len(boxes.classes)} candidates for each"


def _dataset(data: str, boxes: BoxSet) -> str:
    """What the data are called in files: `val.json.gz` → `val`; all of OV-COCO's images are `ov_coco`."""
    if _is_ov_coco(boxes.classes) and len(boxes) >= OV_COCO_IMAGES:
        return "ov_coco"
    return Path(data).name.removesuffix(".gz").removesuffix(".json")


def _is_ov_coco(classes: Classes) -> bool:
    return set(classes.names) == {*ov_coco()["base"], *ov_coco()["novel"]}


_Measured = tuple[dict[str, Any], Table, dict[str, bytes]]  # the record, what is printed, further files


def _detect(
    model: str, pretrained: str | None, boxes: BoxSet, size: int | None, device: torch.device, progress: Progress
) -> _Measured:
    trained = load_detector(model, device)
    classes = _as_learned(boxes.classes, trained.learned, progress)
    found = detect(
        trained.detector,
        boxes,
        trained.embed(classes),
        trained.exponents.of(classes),
        progress.advance,
    )
    unreadable = [image.name for number, image in enumerate(boxes.images) if number not in found]
    if unreadable:
        progress.warn(
            f"{len(unreadable):,} images cannot be read ({', '.join(unreadable[:3])}): they have no detections"
        )
    measured = average_precision(boxes.with_classes(classes), found)
    of_class = {name: ap for name, ap in zip(classes.names, measured.of_class, strict=True) if ap is not None}
    about = {"exponents": asdict(trained.exponents), "of_class": of_class, "corrupt": unreadable, "counts": {}}
    record = {"metrics": measured.scores, "powerclip": about}
    results = json.dumps(coco_results(boxes, found)).encode()
    return record, ap_table(model_names([model])[0], measured), {"detections.json": results}


def _as_learned(classes: Classes, learned: Sequence[str], progress: Progress) -> Classes:
    """The classes of the data, those that the detector has learned being base, whatever the data say."""
    novel = tuple(name not in learned for name in classes.names)
    changed = [name for name, a, b in zip(classes.names, classes.novel, novel, strict=True) if a != b]
    if changed:
        progress.warn(
            f"{len(changed)} classes are base or novel by what this detector was trained on, not as the data say: "
            f"{', '.join(changed[:5])}"
        )
    return Classes(classes.names, novel)


def _name(
    model: str, pretrained: str | None, boxes: BoxSet, size: int | None, device: torch.device, progress: Progress
) -> _Measured:
    done = 0

    def on_images(more: int) -> None:
        nonlocal done
        done += more
        progress.update(done)

    bf16 = device.type == "cuda"
    views: dict[str, dict[str, float]] = {}
    if is_detector(model):
        trained = load_detector(model, device)
        classes = trained.classes(boxes.classes.names)
        texts, size = trained.embed(classes), trained.detector.config.size
        exponents = trained.exponents.of(classes).to(device)
        views |= name_by_detector(trained.detector, boxes, texts, exponents, on_images).accuracies()
        encoder, done = trained.detector.encoder, 0
    else:
        size = size or default_size(resolve(model, pretrained=pretrained))
        encoder, _, tokenizer = load(model, pretrained, device)
        texts = embed_classes(encoder, tokenizer, boxes.classes.names)
    named = name_gold_boxes(encoder, boxes, texts, size, bf16=bf16, on_images=on_images)
    views = {**named.accuracies(), **views}
    baselines = {view: views.pop(view) for view in ("most frequent class", "chance")}
    metrics = {f"{view}_{part}": value for view, parts in views.items() for part, value in parts.items()}
    about = {"size": size, "baselines": baselines, "corrupt": [], "counts": {}}
    record = {"metrics": metrics, "powerclip": about}
    return record, naming_table({**views, **baselines}), {}


def ap_table(name: str, measured: AveragePrecision) -> Table:
    """The three numbers in percent; for OV-COCO's classes beside the paper's Table 15."""
    printed = published()["ov_coco"]["rows"] if _is_ov_coco(measured.classes) else {}
    rows: list[tuple[str, Sequence[float | None], bool]] = [(method, row, True) for method, row in printed.items()]
    rows.append((name, [None if score is None else 100 * score for score in measured.scores.values()], False))
    missing = [n for n, ap in zip(measured.classes.names, measured.of_class, strict=True) if ap is None]
    notes = ["† as published in the paper, for all of OV-COCO and towers trained on CC12M."] if printed else []
    if missing:
        more = ", …" if len(missing) > 5 else ""
        notes.append(f"Means leave out {len(missing)} classes without a box: {', '.join(missing[:5])}{more}.")
    return Table(
        [Column("AP50 base"), Column("AP50 novel"), Column("AP50")],
        [Row(label, [Cell(fixed(value)) for value in values], published=old) for label, values, old in rows],
        title="Table 15. OV-COCO" if printed else "AP50, %",
        corner="Method",
        notes=notes,
    )


def naming_table(views: Mapping[str, Mapping[str, float]]) -> Table:
    """Share of gold boxes named right by each view, in percent: of all boxes, and the mean over classes."""
    parts = ("base", "novel", "all")
    keys = [*parts, *(f"{part}_mean" for part in parts)]
    keys = [key for key in keys if any(key in values for values in views.values())]
    grid = [[100 * values[key] if key in values else None for key in keys] for values in views.values()]
    marks = [rank(column) for column in zip(*grid, strict=True)]
    rows = [
        Row(view, [Cell(fixed(value), marks[k][number]) for k, value in enumerate(grid[number])])
        for number, view in enumerate(views)
    ]
    columns = [Column(key.replace("_mean", ", by class")) for key in keys]
    return Table(columns, rows, title="Gold boxes named right, %", corner="by")
