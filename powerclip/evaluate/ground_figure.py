"""The heatmaps of captions and their phrases over an image, by one or several models, as one PNG."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.data.trees import Tree, parse_bracketed, shorten
from powerclip.errors import UserError
from powerclip.evaluate.ground import GroundingModel, check_caption, ground, open_image, parse_captions

if TYPE_CHECKING:
    from PIL import Image

    from powerclip.report.heatmaps import Row

log = logging.getLogger(__name__)


def draw_grounding(
    image_path: str | Path,
    caption: str | Sequence[str],
    model: str | Path | Sequence[str | Path],
    output: str | Path,
    brackets: str | Sequence[str] | None = None,
    pretrained: str | None = None,
    relative: bool = False,
) -> Path:
    """Write the heatmaps of captions over the image at `image_path`, by one or several models, and return its path.

    Several models stand below each other for each caption. Several captions, such as a caption and its edits, follow
    each other: change a word and see which response moves. A caption that a model cannot read to its end is said in a
    warning.

    Args:
        image_path: any image that Pillow reads.
        caption: what to look for in the image, or several captions.
        model: a saved model or an open_clip name, as `powerclip.load` takes it, or several.
        output: the PNG; its folder is made if it is missing.
        brackets: the tree of each caption, Penn style. Without it, the embedded parser makes one.
        pretrained: the tag of the weights of open_clip names.
        relative: draw the phrases' heatmaps less their mean, see `Grounding.relative`.

    Raises:
        UserError: no such image or model, a tree that does not match, a caption without a word, an output that
            cannot be written.
    """
    # Cheap checks come first, before the model is loaded.
    target = check_output(Path(output), "the heatmaps")
    captions = [caption] if isinstance(caption, str) else list(caption)
    models = [model] if isinstance(model, str | Path) else list(model)
    if not captions or not models:
        raise UserError("grounding needs at least one caption and one model")
    trees = _trees(captions, [brackets] if isinstance(brackets, str) else brackets)
    image = open_image(Path(image_path))

    from powerclip.report.heatmaps import heatmap_figure, save_png

    by_model = [
        _rows(GroundingModel.load(one, pretrained, name=name), image, captions, trees, relative)
        for one, name in zip(models, model_names(models), strict=True)
    ]
    # Caption by caption, the models of each below each other.
    rows = [row for number in range(len(captions)) for row in _hide_repeated_titles(rows[number] for rows in by_model)]
    figure = heatmap_figure([replace(row, name=row.name if len(models) > 1 else "") for row in rows])
    try:
        save_png(figure, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def model_names(models: Sequence[str | Path]) -> list[str]:
    """What models are called beside each other: the last part of the path by which they differ."""
    parts = [Path(model).parts for model in models]
    # A model folder is usually called `model`, which says nothing.
    if len(models) == 1:
        return [next((part for part in reversed(parts[0]) if part != "model"), str(models[0]))]
    for depth in range(1, min(map(len, parts)) + 1):
        ends = [part[-depth] for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [str(model) for model in models]


def _trees(captions: Sequence[str], brackets: Sequence[str] | None) -> list[Tree]:
    if brackets is not None and len(brackets) != len(captions):
        raise UserError(f"{len(captions)} captions, but {len(brackets)} trees: give one tree for each caption, or none")
    if brackets is None:
        trees = parse_captions(captions)
    else:
        trees = [parse_bracketed(one, caption) for one, caption in zip(brackets, captions, strict=True)]
    for caption, tree in zip(captions, trees, strict=True):
        check_caption(caption, tree)
    return trees


def _rows(
    model: GroundingModel, image: Image.Image, captions: Sequence[str], trees: Sequence[Tree], relative: bool
) -> list[Row]:
    """One row of heatmaps for each caption: the whole by its global embedding, then each node below the root by p_B."""
    from powerclip.report.heatmaps import Panel, Row

    seen = _as_seen(model, model.preprocess(image))
    rows = []
    for caption, tree in zip(captions, trees, strict=True):
        found = ground(model, image, caption, tree=tree)
        if found.unread:
            log.warning(
                "%s reads %d tokens of a caption: it did not read %r",
                model.name,
                model.tokenizer.context_length,
                shorten(found.unread),
            )
        found = found.relative() if relative else found
        panels = [Panel(caption, found.heatmap), *(Panel(phrase.text, phrase.heatmap) for phrase in found.phrases[1:])]
        rows.append(Row(seen, panels, name=model.name))
    return rows


def _hide_repeated_titles(rows: Iterable[Row]) -> list[Row]:
    """Rows of one caption: titles are not repeated where the phrases are the same and fit in one line."""
    from powerclip.report.heatmaps import COLUMNS

    first, *others = rows
    titles = [panel.phrase for panel in first.panels]
    same = [len(titles) <= COLUMNS and titles == [panel.phrase for panel in other.panels] for other in others]
    return [first, *(replace(other, continues=repeated) for other, repeated in zip(others, same, strict=True))]


def check_output(path: Path, what: str) -> Path:
    """The path of a PNG that can be written; UserError where it cannot be."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the PNG to write, for example {path / (what.split()[-1] + '.png')}")
    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: {what} are written as PNG; let the name end in .png")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise UserError(f"cannot write {path}: {above} is a file, not a folder")
    return path


def _as_seen(model: GroundingModel, pixels: Tensor) -> Tensor:
    """The image as the model saw it, cropped and scaled, with the normalisation undone: [3, H, W] uint8.

    Heatmaps lie over what the model saw, not over the file.
    """
    settings = model.encoder.clip.visual.preprocess_cfg
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("mean", "std"))
    return ((pixels.cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
