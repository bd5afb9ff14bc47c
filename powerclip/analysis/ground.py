"""Ground a caption in a picture: a heatmap for the caption and for each of its phrases, as one PNG."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from powerclip.alignment.trees import Span, Tree, parse_bracketed, tree_from_spans
from powerclip.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

    from powerclip.data.tokens import CaptionTokenizer
    from powerclip.encoders import DualEncoder


def ground(
    image_path: str | Path, caption: str, model: str | Path, output: str | Path, brackets: str | None = None
) -> Path:
    """Write the heatmaps of `caption` over the picture at `image_path` and return where.

    Args:
        image_path: any picture that Pillow reads.
        caption: what to look for.
        model: a saved model or an open_clip name, as `powerclip.load` takes it.
        output: the PNG; its folder is made if it is missing.
        brackets: the caption's tree, Penn style. Without it, each word is a phrase of its own.

    Raises:
        UserError: no such picture or model, a tree that does not match, a caption without a word, an output that
            cannot be written.
    """
    # What costs nothing to check is checked before the model is loaded.
    target = _check_output(Path(output))
    tree = parse_bracketed(brackets, caption) if brackets is not None else word_tree(caption)
    if not tree.nodes:
        raise UserError(f"caption {caption!r} has no word: say what to look for in the picture")
    picture = _open(Path(image_path))

    from powerclip.analysis.figures import Panel, Row, heatmap_figure, save_png
    from powerclip.data.tokens import CaptionTokenizer
    from powerclip.encoders import load

    encoder, preprocess, open_clip_tokenizer = load(model)
    tokenizer = CaptionTokenizer(open_clip_tokenizer)
    pixels = preprocess(picture)
    phrases, heat = caption_heatmaps(encoder, tokenizer, pixels, caption, tree)
    panels = [Panel(phrase, values) for phrase, values in zip(phrases, heat, strict=True)]
    figure = heatmap_figure([Row(_as_seen(encoder, pixels), panels)])
    try:
        save_png(figure, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None
    return target


def word_tree(caption: str) -> Tree:
    """A tree for a caption whose structure is unknown: the whole, and each word as a phrase of its own."""
    return tree_from_spans([Span(*match.span(), "X") for match in re.finditer(r"\S+", caption)], caption)


@torch.inference_mode()
def caption_heatmaps(
    encoder: DualEncoder, tokenizer: CaptionTokenizer, pixels: Tensor, caption: str, tree: Tree
) -> tuple[list[str], Tensor]:
    """Phrases and their heatmaps [phrases, rows, columns] over one preprocessed picture [3, H, W].

    The first is the caption, by its global embedding; then each node below the root by its p_B. Nodes that lie
    beyond the context length are left out: the model has not read them.
    """
    from powerclip.evaluate.heatmap import patch_similarity, text_queries, word_queries

    _, *below = tree.nodes
    read = max(end for _, end in tokenizer.encode(caption).spans[:-1])
    nodes = tuple(node for node in below if node.start < read)
    device = next(encoder.parameters()).device
    _, patches = encoder.encode_patches(pixels[None].to(device))
    queries = text_queries(encoder, tokenizer, [caption])
    if nodes:
        queries = torch.cat([queries, word_queries(encoder, tokenizer, [caption], [Tree(tree.leaves, nodes)])])
    phrases = [caption, *(caption[node.start : node.end] for node in nodes)]
    return phrases, patch_similarity(patches, queries).unflatten(1, encoder.grid).cpu()


def _open(path: Path) -> Image.Image:
    from PIL import Image, UnidentifiedImageError

    if not path.exists():
        raise UserError(f"no picture at {path}")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a picture in it")
    try:
        with Image.open(path) as file:
            return file.convert("RGB")
    except UnidentifiedImageError:
        raise UserError(f"{path} is not a picture that can be read (JPEG, PNG, WebP, …)") from None
    # Pillow meets damaged files with these: cut short, broken chunks, absurd sizes.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as a picture: {error}") from None


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
    """The picture as the model saw it, cropped and scaled, with the normalisation undone: [3, H, W] uint8.

    Heatmaps lie over what the model saw, not over the file.
    """
    wants = encoder.clip.visual.preprocess_cfg
    mean, std = (torch.tensor(wants[name]).view(3, 1, 1) for name in ("mean", "std"))
    return ((pixels.cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
