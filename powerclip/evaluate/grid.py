"""Grid pointing: 2 × 2 mosaics of captioned images; how much of a phrase's response lies in its own image's tile?

It needs no boxes, so anyone can measure grounding on their own images. Each four images are shown in four mosaics, so
that each of them fills each tile once: a map that is always the same has a quarter of its response in each. And the
shares of a mosaic's images are averaged image by image: a map that ignores its phrase, whatever it sees in the images,
has 25 % on average, however many phrases an image has.

Axes: T phrases · N patches · D width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from powerclip.data.captions import split_member
from powerclip.data.columns import Columns
from powerclip.data.keyed_random import key_of, permutation
from powerclip.data.sidecar import Miss, read_trees, sidecar_path
from powerclip.data.trees import Span, Tree, tree_from_spans
from powerclip.errors import UserError
from powerclip.evaluate import metrics
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.images import ImageSource, TarImages, pack_pixels, unpack_pixels
from powerclip.evaluate.metrics import Metrics
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.tasks import CaptionRetrieval, Scored

if TYPE_CHECKING:
    from PIL import Image

SIDE = 2  # tiles in a row and in a column
TILES = SIDE * SIDE
TILE_SIZE = 224  # pixels of a tile's side: the model's preprocessing makes the mosaic as large as it reads images


@dataclass(frozen=True)
class Mosaics:
    """Mosaics of the images of a source; each four of them make four mosaics, turned by one tile each."""

    images: ImageSource
    order: Sequence[int]  # images of the first four mosaics, of the next four, …

    @property
    def names(self) -> Sequence[str]:
        """The images of each mosaic."""
        names = self.images.names
        return [" + ".join(names[image] for image in self.tiles(number)) for number in range(len(self.order))]

    def tiles(self, number: int) -> list[int]:
        """The images of a mosaic, row by row."""
        group, turn = divmod(number, TILES)
        four = self.order[group * TILES : (group + 1) * TILES]
        return [*four[turn:], *four[:turn]]

    def read(self, index: int) -> bytes:
        """The pixels of a mosaic."""
        from PIL import Image

        canvas = Image.new("RGB", (SIDE * TILE_SIZE, SIDE * TILE_SIZE))
        for place, image in enumerate(self.tiles(index)):
            tile = self.images.decode(self.images.read(image)).convert("RGB")
            row, column = divmod(place, SIDE)
            # Squashed, not cropped: nothing that a caption names is lost.
            canvas.paste(
                tile.resize((TILE_SIZE, TILE_SIZE), Image.Resampling.BICUBIC), (column * TILE_SIZE, row * TILE_SIZE)
            )
        return pack_pixels(canvas)

    def decode(self, content: bytes) -> Image.Image:
        """The image with these pixels."""
        return unpack_pixels(content)


@dataclass(frozen=True)
class GridPointing:
    """Captions with their trees, and mosaics of their images.

    A phrase is a lowest noun phrase. One whose last word is also in a caption of another image of the mosaic could mean
    either, and is left out.
    """

    task: ClassVar[str] = "grid_pointing"
    images: Mosaics
    image_of_phrase: Sequence[int]  # T, numbers of the mosaics' source
    captions: Sequence[str]  # T
    trees: Sequence[Tree]  # T, the phrase is their only node
    left_out: int = 0  # phrases that could also mean another image of their mosaic

    @property
    def summary(self) -> str:
        """`1,000 mosaics, 9,000 phrases`."""
        return f"{len(self.images.names):,} mosaics, {len(self.captions):,} phrases"

    def score(self, embedder: Embedder) -> Scored:
        """`grid_QUERY`, the share of the positive response in the own tile, and `grid_QUERY_hit`, of highest patches.

        Both for phrases in their caption (`words`) and alone (`text`); each image counts the same.
        """
        texts = [caption[tree.nodes[0].start : tree.nodes[0].end] for caption, tree in self._phrases()]
        queries = {"words": embedder.phrases(self.captions, self.trees), "text": embedder.texts(texts)}
        phrases_of: dict[int, list[int]] = {}
        for phrase, image in enumerate(self.image_of_phrase):
            phrases_of.setdefault(image, []).append(phrase)
        tile_of_patch = tiles_of_patches(embedder.encoder.grid)
        names = [f"grid_{query}{what}" for query in queries for what in ("", "_hit")]
        totals = {name: torch.zeros(len(self.images.images.names), dtype=torch.double) for name in names}

        def add(mosaics: Sequence[int], patches: Tensor) -> None:
            """Add what the phrases of some mosaics [batch, N, D] have in their own tiles."""
            for mosaic, own in zip(mosaics, patches.cpu(), strict=True):
                for tile, image in enumerate(self.images.tiles(mosaic)):
                    numbers = phrases_of.get(image, [])
                    for query, vectors in queries.items() if numbers else ():
                        maps = metrics.patch_similarity(own[None], vectors[numbers])  # [T, N]
                        inside = tile_of_patch == tile
                        totals[f"grid_{query}"][image] += metrics.share_inside(maps, inside).mean() / TILES
                        hits = metrics.hits_cells(maps[:, None], inside.expand(len(maps), 1, -1))
                        totals[f"grid_{query}_hit"][image] += hits.double().mean() / TILES

        embedded = embedder.patches(self.images, add)
        # Four mosaics show the same images: an image counts where all of them could be read.
        kept = torch.zeros(len(self.images.images.names), dtype=torch.bool)
        kept[torch.tensor(self.images.order)] = embedded.readable.view(-1, TILES).all(1).repeat_interleave(TILES)
        has_phrases = torch.zeros_like(kept)
        has_phrases[torch.tensor(list(phrases_of))] = True
        kept &= has_phrases
        shares: Metrics = {
            name: embedder.ranks.sum(total)[kept].mean().item() if kept.any() else None
            for name, total in totals.items()
        }
        counts = {"images": int(kept.sum()), "mosaics": int(embedded.readable.sum()), "phrases": len(self.captions)}
        counts |= {"ambiguous": self.left_out}
        return Scored({"": {**shares, "grid_chance": 1 / TILES}}, counts, embedded.corrupt)

    def _phrases(self) -> list[tuple[str, Tree]]:
        return list(zip(self.captions, self.trees, strict=True))


def tiles_of_patches(grid: tuple[int, int]) -> Tensor:
    """The tile that each patch's centre lies in [N], from 0, row by row; -1 for a centre on the line between two."""
    rows, columns = (_halves(size) for size in grid)
    tiles = SIDE * rows[:, None] + columns[None, :]
    return torch.where((rows[:, None] < 0) | (columns[None, :] < 0), -1, tiles).flatten()


def _halves(size: int) -> Tensor:
    centres = 2 * torch.arange(size) + 1 - size  # below 0 in the first half
    return torch.where(centres == 0, -1, (centres > 0).long())


def read_grid(path: Path, seed: int = 0, columns: Columns | None = None) -> GridPointing:
    """Mosaics of the captioned images at `path`: tars, a folder of them, or a table, whose `columns` may be named.

    Trees come from the sidecars beside the tars; captions without one are parsed by the embedded parser.

    Raises:
        UserError: there are fewer than four images with captions, or none has a phrase that only it can mean.
    """
    data = read_path(path, columns=columns)
    if not isinstance(data, CaptionRetrieval):
        raise UserError(f"--grid {path}: images with captions are expected (tars, a table, a folder)")
    return make_grid(data, captions_with_trees(data), str(path), seed)


def make_grid(data: CaptionRetrieval, trees: Sequence[Tree], where: str, seed: int = 0) -> GridPointing:
    """Mosaics of these images, in an order drawn from the seed; up to three images at its end are left out."""
    count = len(data.images.names)
    order = permutation(key_of(seed, count), count).tolist()[: count - count % TILES]
    if not order:
        raise UserError(f"--grid {where}: {count} images are too few for a mosaic of {TILES}")
    owners = data.image_of_caption.tolist()
    words: list[set[str]] = [set() for _ in range(count)]
    for caption, image in zip(data.captions, owners, strict=True):
        words[image] |= set(split_words(caption))
    others: dict[int, set[str]] = {}
    for start in range(0, len(order), TILES):
        four = order[start : start + TILES]
        for image in four:
            others[image] = set().union(*(words[other] for other in four if other != image))
    phrases: dict[tuple[int, str, int], Tree] = {}
    ambiguous = 0
    for caption, tree, image in zip(data.captions, trees, owners, strict=True):
        for node in lowest_noun_phrases(tree) if image in others else ():
            last = split_words(caption[node.start : node.end])[-1:]
            if not last or last[0] in others[image]:
                ambiguous += 1
            else:
                phrases[image, caption, node.start] = Tree(tree_from_spans([node], caption).leaves, (node,))
    if not phrases:
        raise UserError(f"--grid {where}: no caption has a phrase that names one image of its mosaic only")
    return GridPointing(
        Mosaics(data.images, order),
        [image for image, _, _ in phrases],
        [caption for _, caption, _ in phrases],
        list(phrases.values()),
        ambiguous,
    )


def lowest_noun_phrases(tree: Tree) -> list[Span]:
    """The noun phrases with no phrase inside: "a dog", "its red collar"."""
    leaves = set(tree.leaves)
    return [node for node in tree.nodes if node.label == "NP" and (node.start, node.end) in leaves]


def split_words(text: str) -> list[str]:
    """The words of a text in lower case, without the punctuation around them."""
    return [word for word in (part.strip(".,:;!?\"'()[]").lower() for part in text.split()) if word]


def captions_with_trees(
    data: CaptionRetrieval, parse: Callable[[Sequence[str]], Sequence[Tree]] | None = None
) -> list[Tree]:
    """The tree of each caption: from the sidecar beside its tar, else from `parse` or the embedded parser."""
    spans: list[tuple[Span, ...] | None] = [None] * len(data.captions)
    if isinstance(data.images, TarImages):
        members = data.images.members
        paths = {tar: sidecar_path(tar, "trees") for tar in dict.fromkeys(member.tar for member in members)}
        sidecars = {tar: read_trees(path) for tar, path in paths.items() if path.exists()}
        for number, (caption, image) in enumerate(zip(data.captions, data.image_of_caption.tolist(), strict=True)):
            member = members[image]
            if member.tar in sidecars:
                found = sidecars[member.tar].spans(split_member(member.name)[0], caption)
                spans[number] = None if isinstance(found, Miss) else found
    missing = [number for number, found in enumerate(spans) if found is None]
    parsed = iter((parse or _parse)([data.captions[number] for number in missing]) if missing else ())
    return [
        next(parsed) if found is None else tree_from_spans(found, caption)
        for found, caption in zip(spans, data.captions, strict=True)
    ]


def _parse(captions: Sequence[str]) -> list[Tree]:
    from powerclip.annotate.parsers import load_parser

    parsed = load_parser("embedded").parse(captions)
    return [tree_from_spans(tree.spans, caption) for tree, caption in zip(parsed, captions, strict=True)]
