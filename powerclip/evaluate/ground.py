"""Ground a caption in an image: where a model sees each phrase, and which set of regions fits it best.

    found = powerclip.ground("runs/quickstart/seed-0/powerclip/model", "scene.png", "a red star above a blue ring")
    for phrase in found.phrases:
        print(phrase.text, phrase.score, phrase.best)

The steps are functions of their own, for callers that keep their results (`powerclip demo`): `see` images, `read`
captions, `region_masks`, `align`.

Axes: K phrases of one caption · M regions · N patches · D width
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.alignment.regions import embed_regions
from powerclip.data.tokens import CaptionTokenizer
from powerclip.data.trees import Span, Tree, parse_bracketed, shorten, tree_from_spans
from powerclip.errors import UserError
from powerclip.evaluate.embedder import embed_single_nodes, evaluating
from powerclip.evaluate.ground_regions import SEGMENTED, Box, Regions, find_pieces, region_masks
from powerclip.evaluate.metrics import patch_similarity
from powerclip.evaluate.region_sets import Aggregation, Similarity, check_sets, score_sets

if TYPE_CHECKING:
    from PIL import Image

    from powerclip.annotate.parsers import Parser
    from powerclip.annotate.segmenters import Segmenter
    from powerclip.encoders import DualEncoder
    from powerclip.encoders.transforms import Preprocess, Tokenizer

_DIGITS = 5  # of numbers in JSON


@dataclass(frozen=True)
class GroundSettings:
    """How a caption is grounded.

    Raises:
        UserError: settings that do not go together.
    """

    regions: Regions = field(default_factory=Regions)
    similarity: Similarity = "cosine"  # of a set of regions with a phrase, see `region_sets`
    aggregation: Aggregation = "exact"  # over all sets, or by the paper's approximation
    centre: Literal["none", "image"] = "none"  # image: its mean patch is subtracted from every patch of a region
    tau: float = 0.001  # temperature of the approximation
    alpha: float = 0.75  # of NLA-T2

    def __post_init__(self) -> None:
        check_sets(self.regions.count, self.similarity, self.aggregation)
        if self.centre not in ("none", "image"):
            raise UserError(f"regions are centred by none or image, not {self.centre!r}")
        if not 0 < self.tau <= 1 or not 0 <= self.alpha <= 1:
            raise UserError("tau lies between 0 and 1 and is not 0, alpha lies between 0 and 1")


@dataclass(frozen=True)
class GroundingModel:
    """A model with what turns images and captions into its input."""

    name: str
    encoder: DualEncoder
    preprocess: Preprocess
    tokenizer: CaptionTokenizer

    @classmethod
    def load(
        cls, model: str | Path, pretrained: str | None = None, device: str = "cpu", name: str | None = None
    ) -> GroundingModel:
        """The model that `powerclip.load` gives, under its own or another name."""
        from powerclip.encoders import load

        return cls.of(load(model, pretrained, device), str(model) if name is None else name)

    @classmethod
    def of(cls, loaded: tuple[DualEncoder, Preprocess, Tokenizer], name: str = "model") -> GroundingModel:
        """What `powerclip.load` returned, as one."""
        encoder, preprocess, tokenizer = loaded
        return cls(name, encoder, preprocess, CaptionTokenizer(tokenizer))

    @property
    def device(self) -> torch.device:
        """Where the towers are."""
        return next(self.encoder.parameters()).device


@dataclass(frozen=True)
class Seen:
    """What a model makes of an image."""

    image: Tensor  # [D] normalised
    patches: Tensor  # [N, D]
    grid: tuple[int, int]
    view: Box  # the part of the image under the grid, in shares; beyond 0 … 1 where the image was padded


@dataclass(frozen=True)
class ReadCaption:
    """What a model makes of a caption."""

    caption: str
    text: Tensor  # [D] normalised
    nodes: tuple[Span, ...]  # K, in pre-order; those beyond the context length are left out
    phrases: Tensor  # [K, D] p_B
    leaves: Tensor  # [K] how many leaves each has
    unread: str  # what the context length cut off


@dataclass(frozen=True)
class Phrase:
    """A node of the caption's tree, and where it is seen."""

    text: str
    start: int  # in characters of the caption
    end: int
    label: str  # of the parse tree: NP, PP, …
    parent: int | None  # the number of the phrase around it
    heatmap: Tensor  # [rows, columns] cosine of each patch with p_B
    similarities: Tensor  # [M] cosine of each region with p_B
    best: tuple[int, ...]  # the regions of the best set
    shares: Tensor  # [M] what each region adds to the score
    score: float  # of the best set


@dataclass(frozen=True)
class Grounding:
    """A caption and its phrases in an image, as one model sees them."""

    model: str
    caption: str
    unread: str  # the end of the caption that the model did not read; empty when it read all
    grid: tuple[int, int]  # rows and columns of patches
    view: Box  # the part of the image under the grid, in shares
    regions: tuple[tuple[int, ...], ...]  # M: the patches of each, row by row
    heatmap: Tensor  # [rows, columns] cosine of each patch with the global embedding of the caption
    phrases: tuple[Phrase, ...]  # K, in pre-order: the first is the whole caption
    clip: float  # cosine of the global embeddings: CLIP's score
    t2r: float  # mean over phrases of the best set's score
    r2t: float  # mean over sets of the best phrase's score
    settings: GroundSettings

    @property
    def score(self) -> float:
        """S̄, what PowerCLIP compares pairs by: both aggregations together."""
        return self.t2r + self.r2t

    def relative(self) -> Grounding:
        """The same with the phrases' heatmaps less their mean: what tells a phrase from the others of its caption.

        Patches that prefer every phrase do not show in them. The mean is that of the lowest phrases, in which no other
        lies; where there is only one, heatmaps stay as they are.
        """
        above = {phrase.parent for phrase in self.phrases}
        lowest = [phrase.heatmap for number, phrase in enumerate(self.phrases) if number not in above]
        if len(lowest) < 2:
            return self
        mean = torch.stack(lowest).mean(0)
        return replace(self, phrases=tuple(replace(one, heatmap=one.heatmap - mean) for one in self.phrases))

    def to_json(self) -> dict[str, Any]:
        """Everything as lists, numbers and text."""
        rounded = functools.partial(round, ndigits=_DIGITS)
        return {
            "model": self.model,
            "caption": self.caption,
            "unread": self.unread,
            "grid": list(self.grid),
            "view": [rounded(side) for side in self.view],
            "regions": [list(cells) for cells in self.regions],
            "heatmap": _numbers(self.heatmap),
            "phrases": [
                {
                    "text": phrase.text,
                    "start": phrase.start,
                    "end": phrase.end,
                    "label": phrase.label,
                    "parent": phrase.parent,
                    "heatmap": _numbers(phrase.heatmap),
                    "similarities": _numbers(phrase.similarities),
                    "best": list(phrase.best),
                    "shares": _numbers(phrase.shares),
                    "score": rounded(phrase.score),
                }
                for phrase in self.phrases
            ],
            "scores": {name: rounded(getattr(self, name)) for name in ("clip", "t2r", "r2t", "score")},
            "settings": asdict(self.settings),
        }


def ground(
    model: str | Path | GroundingModel | tuple[DualEncoder, Preprocess, Tokenizer],
    image: str | Path | Image.Image,
    caption: str,
    settings: GroundSettings | None = None,
    *,
    tree: Tree | str | None = None,
    pretrained: str | None = None,
    segmenter: Segmenter | None = None,
) -> Grounding:
    """Where a model sees a caption and each of its phrases in an image.

    Args:
        model: what `powerclip.load` takes or what it returned.
        image: a file that Pillow reads, or an image.
        caption: what to look for in it.
        settings: the regions, and how sets of them are scored.
        tree: the caption's parse tree, also as Penn brackets; without it the embedded parser makes one.
        pretrained: with an open_clip name, the tag of its weights.
        segmenter: for regions of kind `mobile_sam`; superpixels need none.

    Raises:
        UserError: no such image or model, a caption without a word, settings that do not go together.

    Examples:
        >>> import torch, powerclip
        >>> from PIL import Image
        >>> model = powerclip.load("ViT-B-32")
        >>> found = powerclip.ground(model, Image.new("RGB", (80, 60)), "a dog on a red chair")
        >>> [phrase.text for phrase in found.phrases]
        ['a dog on a red chair', 'a dog', 'on a red chair', 'a red chair']
    """
    settings = settings or GroundSettings()
    if not isinstance(tree, Tree):
        tree = parse_captions([caption])[0] if tree is None else parse_bracketed(tree, caption)
    check_caption(caption, tree)
    opened = open_image(Path(image)) if isinstance(image, str | Path) else image
    pieces = None
    if settings.regions.kind in SEGMENTED:
        pieces = find_pieces(opened, segmenter or _segmenter(settings.regions.kind))
    if isinstance(model, str | Path):
        model = GroundingModel.load(model, pretrained)
    elif not isinstance(model, GroundingModel):
        model = GroundingModel.of(model)
    (seen,), (read_caption,) = see(model, [opened]), read(model, [caption], [tree])
    masks = region_masks(settings.regions, seen.view, seen.grid, pieces)
    return align(model.name, seen, read_caption, masks, settings)


def parse_captions(captions: Sequence[str], parser: Parser | None = None) -> list[Tree]:
    """The trees that a parser makes of captions: the embedded one, which is loaded once."""
    parsed = (parser or _embedded_parser()).parse(captions)
    return [tree_from_spans(one.spans, caption) for one, caption in zip(parsed, captions, strict=True)]


def check_caption(caption: str, tree: Tree) -> None:
    """UserError for a caption without a word."""
    if not tree.nodes:
        raise UserError(f"caption {shorten(caption)!r} has no word: say what to look for in the image")


def see(model: GroundingModel, images: Sequence[Image.Image]) -> list[Seen]:
    """Images as a model sees them, in one batch."""
    pixels = torch.stack([model.preprocess(image.convert("RGB")) for image in images])
    with evaluating(model.encoder):
        embedded, patches = model.encoder.encode_patches(pixels.to(model.device))
    views = [view_of(model, image.size) for image in images]
    return [
        Seen(one.float().cpu(), cells.float().cpu(), model.encoder.grid, view)
        for one, cells, view in zip(embedded, patches, views, strict=True)
    ]


def read(model: GroundingModel, captions: Sequence[str], trees: Sequence[Tree]) -> list[ReadCaption]:
    """Captions and the nodes of their trees as a model reads them, in one batch."""
    tokenized = [model.tokenizer.encode(caption) for caption in captions]
    # Where the model stopped reading: behind the last token that stands for characters.
    ends = [max((end for start, end in tokens.spans if end > start), default=0) for tokens in tokenized]
    kept = [
        tuple(node for node in tree.nodes if node.start < end) or tree.nodes[:1]
        for tree, end in zip(trees, ends, strict=True)
    ]
    owners = [number for number, nodes in enumerate(kept) for _ in nodes]
    single = [Tree(trees[number].leaves, (node,)) for number, nodes in enumerate(kept) for node in nodes]
    tokens = model.tokenizer.pad([one.ids for one in tokenized])
    with evaluating(model.encoder):
        texts, words = model.encoder.encode_words(tokens.to(model.device))
        phrases, leaves = embed_single_nodes(words, owners, single, [tokenized[owner] for owner in owners])
    counts = [len(nodes) for nodes in kept]
    return [
        ReadCaption(caption, text, nodes, of_nodes, number, caption[end:].strip())
        for caption, text, nodes, of_nodes, number, end in zip(
            captions,
            texts.float().cpu(),
            kept,
            phrases.float().cpu().split(counts),
            leaves.cpu().split(counts),
            ends,
            strict=True,
        )
    ]


def align(name: str, seen: Seen, caption: ReadCaption, masks: Tensor, settings: GroundSettings) -> Grounding:
    """The grounding of a caption in an image with regions [M, N]."""
    regions = embed_regions(seen.patches[None], masks[None], settings.centre)[0]
    sets = score_sets(
        regions,
        caption.phrases,
        caption.leaves,
        similarity=settings.similarity,
        aggregation=settings.aggregation,
        tau=settings.tau,
        alpha=settings.alpha,
    )
    queries = torch.cat([caption.text[None], caption.phrases])
    whole, *heatmaps = patch_similarity(seen.patches[None], queries).unflatten(1, seen.grid)
    cosines = F.normalize(caption.phrases, dim=-1) @ regions.T
    parents = _parents(caption.nodes)
    return Grounding(
        model=name,
        caption=caption.caption,
        unread=caption.unread,
        grid=seen.grid,
        view=seen.view,
        regions=tuple(tuple(mask.nonzero().flatten().tolist()) for mask in masks),
        heatmap=whole,
        phrases=tuple(
            Phrase(
                text=caption.caption[node.start : node.end],
                start=node.start,
                end=node.end,
                label=node.label,
                parent=parents[number],
                heatmap=heatmaps[number],
                similarities=cosines[number],
                best=tuple(sets.best[number].nonzero().flatten().tolist()),
                shares=sets.shares[number],
                score=float(sets.scores[number]),
            )
            for number, node in enumerate(caption.nodes)
        ),
        clip=float(seen.image @ caption.text),
        t2r=sets.t2r,
        r2t=sets.r2t,
        settings=settings,
    )


def view_of(model: GroundingModel, size: tuple[int, int]) -> Box:
    """The part of an image, `size` pixels wide and high, that lies under the model's grid, in shares of the image."""
    settings = model.encoder.clip.visual.preprocess_cfg
    if settings["resize_mode"] == "squash":
        return 0.0, 0.0, 1.0, 1.0
    height, width = model.encoder.image_size
    scales = width / size[0], height / size[1]
    # The shorter side fills the model's and the longer is cropped, or the longer fills it and the shorter is padded.
    scale = max(scales) if settings["resize_mode"] == "shortest" else min(scales)
    x, y = (share / scale / 2 for share in scales)
    return 0.5 - x, 0.5 - y, 0.5 + x, 0.5 + y


def open_image(path: Path) -> Image.Image:
    """The image in a file, as RGB.

    Raises:
        UserError: there is none, or it cannot be read.
    """
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


@functools.cache
def _embedded_parser() -> Parser:
    from powerclip.annotate.parsers import load_parser

    return load_parser("embedded", "cpu")


def _segmenter(kind: str) -> Segmenter:
    from powerclip.annotate.segmenters import load_segmenter

    return load_segmenter(kind, "cpu")


def _parents(nodes: Sequence[Span]) -> list[int | None]:
    """The number of the node around each, in pre-order."""
    parents: list[int | None] = []
    around: list[int] = []
    for number, node in enumerate(nodes):
        while around and nodes[around[-1]].end < node.end:
            around.pop()
        parents.append(around[-1] if around else None)
        around.append(number)
    return parents


def _numbers(values: Tensor) -> list[Any]:
    # In double precision, where a rounded number prints with as many digits as it has.
    return values.double().round(decimals=_DIGITS).tolist()
