"""Ground captions in an image: a heatmap for each caption and each of its phrases, by each model, as one PNG."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.data.trees import Span, Tree, parse_bracketed, tree_from_spans
from powerclip.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

    from powerclip.encoders import DualEncoder
    from powerclip.evaluate.embedder import Embedder
    from powerclip.report.heatmaps import Row


def ground(
    image_path: str | Path,
    caption: str | Sequence[str],
    model: str | Path | Sequence[str | Path],
    output: str | Path,
    brackets: str | Sequence[str] | None = None,
) -> Path:
    """Write the heatmaps of captions over the image at `image_path`, by one or several models, and return its path.

    Several models stand below each other for each caption. Several captions, such as a caption and its edits, follow
    each other: change a word and see which response moves.

    Args:
        image_path: any image that Pillow reads.
        caption: what to look for in the image, or several captions.
        model: a saved model or an open_clip name, as `powerclip.load` takes it, or several.
        output: the PNG; its folder is made if it is missing.
        brackets: the tree of each caption, Penn style. Without it, each word is a phrase of its own.

    Raises:
        UserError: no such image or model, a tree that does not match, a caption without a word, an output that
            cannot be written.
    """
    # Cheap checks come first, before the model is loaded.
    target = _check_output(Path(output))
    captions = [caption] if isinstance(caption, str) else list(caption)
    models = [model] if isinstance(model, str | Path) else list(model)
    if not captions or not models:
        raise UserError("grounding needs at least one caption and one model")
    trees = _trees(captions, [brackets] if isinstance(brackets, str) else brackets)
    image = _open(Path(image_path))

    from powerclip.report.heatmaps import heatmap_figure, save_png

    by_model = [_rows(one, name, image, captions, trees) for one, name in zip(models, _names(models), strict=True)]
    # Caption by caption, the models of each below each other.
    rows = [row for number in range(len(captions)) for row in _hide_repeated_titles(rows[number] for rows in by_model)]
    figure = heatmap_figure(rows)
    try:
        save_png(figure, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def _trees(captions: Sequence[str], brackets: Sequence[str] | None) -> list[Tree]:
    if brackets is not None and len(brackets) != len(captions):
        raise UserError(f"{len(captions)} captions, but {len(brackets)} trees: give one tree for each caption, or none")
    trees = []
    for number, caption in enumerate(captions):
        tree = word_tree(caption) if brackets is None else parse_bracketed(brackets[number], caption)
        if not tree.nodes:
            raise UserError(f"caption {caption!r} has no word: say what to look for in the image")
        trees.append(tree)
    return trees


def _rows(
    model: str | Path, name: str, image: Image.Image, captions: Sequence[str], trees: Sequence[Tree]
) -> list[Row]:
    """One row of heatmaps for each caption."""
    from powerclip.data.tokens import CaptionTokenizer
    from powerclip.encoders import load
    from powerclip.evaluate.embedder import Embedder
    from powerclip.report.heatmaps import Panel, Row

    encoder, preprocess, tokenizer = load(model)
    embedder = Embedder(encoder, CaptionTokenizer(tokenizer))
    pixels = preprocess(image)
    seen = _as_seen(encoder, pixels)
    rows = []
    for caption, tree in zip(captions, trees, strict=True):
        phrases, heat = caption_heatmaps(embedder, pixels, caption, tree)
        panels = [Panel(phrase, values) for phrase, values in zip(phrases, heat, strict=True)]
        rows.append(Row(seen, panels, name=name))
    return rows


def _hide_repeated_titles(rows: Iterable[Row]) -> list[Row]:
    """Rows of one caption: titles are not repeated where the phrases are the same and fit in one line."""
    from powerclip.report.heatmaps import COLUMNS

    first, *others = rows
    titles = [panel.phrase for panel in first.panels]
    same = [len(titles) <= COLUMNS and titles == [panel.phrase for panel in other.panels] for other in others]
    return [first, *(replace(other, continues=repeated) for other, repeated in zip(others, same, strict=True))]


def _names(models: Sequence[str | Path]) -> list[str]:
    """What stands beside each row: nothing for one model; else the last part of the path by which they differ."""
    if len(models) == 1:
        return [""]
    parts = [Path(model).parts for model in models]
    for depth in range(1, min(map(len, parts)) + 1):
        ends = [part[-depth] for part in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [str(model) for model in models]


def word_tree(caption: str) -> Tree:
    """A tree for a caption whose structure is unknown: the caption, and each word as a phrase."""
    return tree_from_spans([Span(*match.span(), "X") for match in re.finditer(r"\S+", caption)], caption)


def caption_heatmaps(embedder: Embedder, pixels: Tensor, caption: str, tree: Tree) -> tuple[list[str], Tensor]:
    """Phrases and their heatmaps [phrases, rows, columns] over one preprocessed image [3, H, W].

    The first is the caption, by its global embedding; then each node below the root by its p_B. Nodes that lie
    beyond the context length are left out: the model has not read them.
    """
    from powerclip.evaluate.embedder import evaluating
    from powerclip.evaluate.metrics import patch_similarity

    _, *inner = tree.nodes
    read_until = max(end for _, end in embedder.tokenizer.encode(caption).spans[:-1])
    nodes = tuple(node for node in inner if node.start < read_until)
    with evaluating(embedder.encoder):
        patches = embedder.encoder.encode_patches(pixels[None].to(embedder.device))[1].cpu()
    queries = torch.cat([embedder.texts([caption]), embedder.phrases([caption], [Tree(tree.leaves, nodes)])])
    phrases = [caption, *(caption[node.start : node.end] for node in nodes)]
    return phrases, patch_similarity(patches, queries).unflatten(1, embedder.encoder.grid)


def _open(path: Path) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    if not path.exists():
        raise UserError(f"no image at {path}")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name an image in it")
    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except UnidentifiedImageError:
        raise UserError(f"{path} is not an image that can be read (JPEG, PNG, WebP, …)") from None
    # What Pillow raises for damaged files: cut short, broken chunks, absurd sizes.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image: {error}") from None


def _check_output(path: Path) -> Path:
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the PNG to write, for example {path / 'heatmaps.png'}")
    if path.suffix.lower() != ".png":
        raise UserError(f"{path}: the heatmaps are written as PNG; let the name end in .png")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise UserError(f"cannot write {path}: {above} is a file, not a folder")
    return path


def _as_seen(encoder: DualEncoder, pixels: Tensor) -> Tensor:
    """The image as the model saw it, cropped and scaled, with the normalisation undone: [3, H, W] uint8.

    Heatmaps lie over what the model saw, not over the file.
    """
    settings = encoder.clip.visual.preprocess_cfg
    mean, std = (torch.tensor(settings[name]).view(3, 1, 1) for name in ("mean", "std"))
    return ((pixels.cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
