"""Scores of images with texts by their parts: late interaction and powersets, beside the cosine of global embeddings.

    global     the cosine of the global embeddings, which `tasks` compares itself
    late       FILIP's late interaction: for an image's query the mean over its patches of the best token, for a text's
               the mean over its tokens of the best patch
    powerset   S̄ = T2R + R2T, as the alignment loss scores a pair, by the settings that a model was trained with

A pair's powerset score must not depend on chance or on company. So the regions of an image are boxes drawn from a seed
and the image's number, or all boxes of a coarse grid. And what training centres by its batch is centred here by the
data set: by the mean patch of all its images, each counted once, and the mean word of all its texts. What a text is
compared with then depends on the data set as a whole, not on the order or the size of batches.

Images go through the tower batch by batch, prepared as for global embeddings; kept are, of an image, its patches while
its batch is scored (late) or its regions (powerset), of a text its tokens, and one number for each image and target.

Axes: n images · S targets (texts, or classes of several texts) · N patches · L tokens · M regions · D width
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.embed import embed_captions
from powerclip.alignment.late_interaction import late_pair_scores, late_scores
from powerclip.alignment.phrases import Phrases
from powerclip.alignment.ragged import Segments
from powerclip.alignment.regions import (
    MOST_ENUMERATED,
    DrawnRegions,
    boxes_of,
    centre_regions,
    regions_of,
    sum_regions,
)
from powerclip.alignment.score import score_all, score_pairs
from powerclip.data.keyed_random import keys_of, uniforms
from powerclip.data.tokens import Nodes, TokenizedCaption, pack_phrases
from powerclip.data.trees import Span, Tree, tree_from_spans
from powerclip.errors import UserError
from powerclip.evaluate.embedder import BATCH, Embedder, evaluating
from powerclip.evaluate.images import ImageSource
from powerclip.runtime.files import write_atomic

ScoreName = Literal["global", "late", "powerset"]
SCORES: tuple[ScoreName, ...] = ("global", "late", "powerset")
PAIR_ELEMENTS = 2**25  # of the features of selected pairs that are scored at once
BOXES = 10  # M of a model that says nothing of its regions


@dataclass(frozen=True)
class ScoreSettings:
    """How an image is compared with a text.

    Raises:
        UserError: settings that do not go together.
    """

    score: ScoreName = "global"
    rerank: int = 0  # the so many best by global embeddings are scored again; 0: all pairs are
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)  # of powerset
    nodes: Nodes = "phrases"  # of powerset: which constituents of the trees take part
    boxes: int = BOXES  # M, random boxes of an image
    largest: float = 1.0  # longest side of a random box, of the image's
    drawn: DrawnRegions = "random"  # or partition: boxes that cover the image once
    grid: int = 0  # all boxes of a grid of so many cells a side instead
    seed: int = 0  # of the random boxes
    ends: bool = True  # of late: whether the tokens for start and end of text take part

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UserError(f"--score: there are {', '.join(SCORES)}, not {self.score!r}")
        if self.rerank < 0 or self.rerank == 1:
            raise UserError(f"--rerank: the best {self.rerank} cannot change places; 2 or more can")
        if self.rerank and self.score == "global":
            raise UserError("--rerank needs --score late or powerset: by what shall the best be scored again?")
        if self.boxes < 1 or not 0 <= self.grid <= 8:
            raise UserError("--boxes: a number of random boxes such as 10, or a grid of at most 8x8 such as 3x3")
        enumerates = self.alignment.aggregation == "exact" and self.alignment.region_sets
        if self.score == "powerset" and enumerates and self.regions > MOST_ENUMERATED:
            raise UserError(
                f"--boxes: {self.regions} boxes have 2^{self.regions} sets, and alignment.aggregation is exact: "
                f"at most {MOST_ENUMERATED}, or aggregation=nla"
            )

    @property
    def regions(self) -> int:
        """M."""
        sides = self.grid * (self.grid + 1) // 2
        return sides**2 if self.grid else self.boxes

    @property
    def name(self) -> str:
        """`powerset`, or `powerset of the 100 best`: what results and tables call it."""
        return f"{self.score} of the {self.rerank} best" if self.rerank else self.score

    @property
    def about(self) -> dict[str, Any]:
        """All that it depends on, for the file of a result."""
        about: dict[str, Any] = {"name": self.name}
        if self.score == "late":
            return about | {"ends": self.ends}
        default = asdict(AlignmentConfig())
        changed = {key: value for key, value in asdict(self.alignment).items() if default[key] != value}
        drawn: dict[str, Any] = {} if self.drawn == "random" else {"drawn": self.drawn}
        boxes = {"grid": self.grid} if self.grid else {"largest": self.largest, "seed": self.seed, **drawn}
        return about | {"alignment": changed, "nodes": self.nodes, "regions": self.regions, **boxes}


@dataclass(frozen=True)
class Compared:
    """Scores of images with targets, for an image's query and for a text's; the same where a score is symmetric."""

    to_text: Tensor  # [n, S]
    to_image: Tensor  # [n, S]
    readable: Tensor  # [n] bool
    corrupt: tuple[str, ...]


@dataclass(frozen=True)
class _Texts:
    """Texts of similar lengths through the tower."""

    rows: Tensor  # [b] their numbers, on the CPU
    words: Tensor  # [b, L, D]
    tokenized: list[TokenizedCaption]

    def real(self, ends: bool) -> Tensor:
        """The tokens that take part in late interaction [b, L]; without `ends` one stays where there is no other."""
        lengths = torch.tensor([len(tokens) for tokens in self.tokenized]).unsqueeze(1)
        position = torch.arange(self.words.shape[1])
        inside = (position > 0) & (position < lengths - 1) | ((position == lengths - 1) & (lengths <= 2))
        return (position < lengths if ends else inside).to(self.words.device)


def compare_parts(
    embedder: Embedder,
    source: ImageSource,
    texts: Sequence[str],
    settings: ScoreSettings,
    *,
    trees: Sequence[Tree] | None = None,
    target: Tensor | None = None,
    wanted: Tensor | None = None,
) -> Compared:
    """Score all images with all targets, or the `wanted` pairs.

    Args:
        embedder: the model. On several ranks each scores its own images; texts are encoded on each of them.
        source: the images.
        texts: what they are compared with.
        settings: by which score; not the global one.
        trees: of the texts, for powersets; parsed where they are not given.
        target: which target each text belongs to [texts]; the score of a target is the mean over its texts. By default
            each is its own.
        wanted: [n, S] bool, what is scored; the others' scores are 0.

    Raises:
        UserError: more than 0.1 % of the images cannot be read.
    """
    target = torch.arange(len(texts)) if target is None else target
    if settings.score == "powerset":
        trees = parse_texts(embedder, texts) if trees is None else trees
    with evaluating(embedder.encoder):
        groups = list(_encode(embedder, texts))
        weights = 1 / torch.bincount(target)[target].float()  # [texts]
        targets = _Targets(target, weights, wanted, torch.zeros(2, len(source.names), int(target.max()) + 1))
        if settings.score == "late":
            return _late(embedder, source, groups, settings, targets)
        assert trees is not None
        return _powerset(embedder, source, groups, trees, settings, targets)


@dataclass(frozen=True)
class _Targets:
    """Where the scores of texts are collected."""

    target: Tensor  # [texts]
    weights: Tensor  # [texts] of a text in its target's mean
    wanted: Tensor | None  # [n, S]
    sums: Tensor  # [2, n, S] for queries by image and by text

    def add_all(self, images: Sequence[int], rows: Tensor, scores: Sequence[Tensor]) -> None:
        """Add the scores [images, texts] of some images with the texts of some rows."""
        for total, values in zip(self.sums, scores, strict=True):
            total[images] = total[images].index_add(1, self.target[rows], values.float().cpu() * self.weights[rows])

    def add_pairs(self, images: Tensor, rows: Tensor, scores: Sequence[Tensor]) -> None:
        """Add the scores [pairs] of images with the texts of some rows."""
        for total, values in zip(self.sums, scores, strict=True):
            where = (images, self.target[rows])
            total.index_put_(where, values.float().cpu() * self.weights[rows], accumulate=True)

    def pairs(self, images: Sequence[int], rows: Tensor) -> tuple[Tensor, Tensor]:
        """The wanted pairs of some images with the texts of some rows: positions in both."""
        assert self.wanted is not None
        places: Tensor = self.wanted[torch.tensor(images)][:, self.target[rows]].nonzero()
        return places[:, 0], places[:, 1]


def _late(
    embedder: Embedder, source: ImageSource, groups: Sequence[_Texts], settings: ScoreSettings, targets: _Targets
) -> Compared:
    tokens = [(group.rows, *_unit_words(group, settings.ends)) for group in groups]

    def score(images: Sequence[int], patches: Tensor) -> None:
        patches = normalize(patches.float(), dim=-1)
        for rows, words, real in tokens:
            if targets.wanted is None:
                targets.add_all(images, rows, late_scores(patches, words, real))
                continue
            image, text = targets.pairs(images, rows)
            size = max(1, PAIR_ELEMENTS // ((patches.shape[1] + words.shape[1]) * words.shape[2]))
            for i, t in zip(image.split(size), text.split(size), strict=True):
                of_pairs = late_pair_scores(patches[i], words[t], real[t])
                targets.add_pairs(torch.tensor(images)[i], rows[t], of_pairs)

    embedded = embedder.patches(source, score, squash=False)
    to_text, to_image = embedder.ranks.sum(targets.sums)
    return Compared(to_text, to_image, embedded.readable, embedded.corrupt)


def _unit_words(group: _Texts, ends: bool) -> tuple[Tensor, Tensor]:
    real = group.real(ends)
    return normalize(torch.where(real.unsqueeze(-1), group.words.float(), 0.0), dim=-1), real


def _powerset(
    embedder: Embedder,
    source: ImageSource,
    groups: Sequence[_Texts],
    trees: Sequence[Tree],
    settings: ScoreSettings,
    targets: _Targets,
) -> Compared:
    config, device, ranks = settings.alignment, embedder.device, embedder.ranks
    # Scoring is short: on a GPU the formulas as they are written cost less than a kernel takes to compile.
    config = replace(config, backend="reference") if device.type == "cuda" else config
    phrases = [_phrases(group, trees, settings.nodes) for group in groups]
    mean_word = _mean_word(groups, phrases)
    nodes = [
        embed_captions(group.words, packed, config, mean=mean_word)
        for group, packed in zip(groups, phrases, strict=True)
    ]
    count, width = len(source.names), embedder.encoder.embed_dim
    sums, means = torch.zeros(count, settings.regions, width), torch.zeros(count, 1, width)
    grid = embedder.encoder.grid

    def keep(images: Sequence[int], patches: Tensor) -> None:
        masks = draw_regions(images, grid, settings).to(device)
        of_images, mean = sum_regions(patches, masks)
        sums[images], means[images] = of_images.cpu(), mean.float().cpu()

    embedded = embedder.patches(source, keep, squash=False)
    sums, means = ranks.sum(sums), ranks.sum(means)
    mean_patch = means[embedded.readable].mean(0, keepdim=True)
    mine = [number for number in embedded.readable.nonzero()[:, 0].tolist() if number % ranks.count == ranks.rank]
    for start in range(0, len(mine), BATCH):
        images = mine[start : start + BATCH]
        mean = means[images] if config.centre == "image" else mean_patch
        masks = draw_regions(images, grid, settings).to(device)
        regions = centre_regions(sums[images].to(device), masks, mean.to(device), config.centre)
        for group, (vectors, segments) in zip(groups, nodes, strict=True):
            _score_group(regions, images, group, vectors, segments, config, targets)
    to_text, to_image = ranks.sum(targets.sums)
    return Compared(to_text, to_image, embedded.readable, embedded.corrupt)


def _score_group(
    regions: Tensor,
    images: Sequence[int],
    group: _Texts,
    nodes: Tensor,
    segments: Segments,
    config: AlignmentConfig,
    targets: _Targets,
) -> None:
    """Add the scores of some images' regions [B, M, D] with a group's nodes [T, D]."""
    if targets.wanted is None:
        scores = score_all(regions, nodes, segments, config)
        targets.add_all(images, group.rows, (scores, scores))
        return
    image, text = targets.pairs(images, group.rows)
    sets = 2 ** regions.shape[1] if config.aggregation == "exact" and config.region_sets else 0
    each = (segments.longest + regions.shape[1]) * regions.shape[2] + segments.longest * sets
    for i, t in zip(image.split(max(1, PAIR_ELEMENTS // each)), text.split(max(1, PAIR_ELEMENTS // each)), strict=True):
        of_pairs = score_pairs(regions, nodes, segments, i.to(regions.device), t.to(regions.device), config)
        targets.add_pairs(torch.tensor(images)[i], group.rows[t], (of_pairs, of_pairs))


def draw_regions(images: Sequence[int], grid: tuple[int, int], settings: ScoreSettings) -> Tensor:
    """The boxes [images, M, N] of images with these numbers: drawn as in training, or all of a grid, alike for all."""
    if settings.grid:
        ends = torch.arange(settings.grid + 1) / settings.grid
        first, last = torch.triu_indices(settings.grid + 1, settings.grid + 1, 1)
        middle, length = (ends[first] + ends[last]) / 2, ends[last] - ends[first]
        rows, columns = (torch.cartesian_prod(*[torch.arange(len(first))] * 2)).unbind(1)
        draws = torch.stack([middle[rows], length[rows], middle[columns], length[columns]]).unsqueeze(1)
        return boxes_of(draws, grid).expand(len(images), -1, -1)
    numbers = uniforms(keys_of(settings.seed, torch.tensor(images).numpy()), 4 * settings.boxes)
    draws = torch.from_numpy(numbers).float().view(len(images), 4, settings.boxes).transpose(0, 1)
    return regions_of(draws, grid, settings.drawn, settings.largest)


def _phrases(group: _Texts, trees: Sequence[Tree], nodes: Nodes) -> Phrases:
    own = [trees[row] for row in group.rows.tolist()]
    return pack_phrases(own, group.tokenized, group.words.shape[1], nodes).to(group.words.device)


def _mean_word(groups: Sequence[_Texts], phrases: Sequence[Phrases]) -> Tensor:
    """The mean [D] of all words that belong to a leaf; where there are none, zeros."""
    total = torch.stack(
        [
            torch.where(packed.words.unsqueeze(-1), group.words.float(), 0).sum((0, 1))
            for group, packed in zip(groups, phrases, strict=True)
        ]
    ).sum(0)
    return total / sum(packed.words.sum() for packed in phrases)


def _encode(embedder: Embedder, texts: Sequence[str]) -> Iterator[_Texts]:
    """The texts through the tower, from short to long in batches."""
    tokenized = [embedder.tokenizer.encode(text) for text in texts]
    order = sorted(range(len(texts)), key=lambda row: len(tokenized[row]))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        tokens = embedder.tokenizer.pad([tokenized[row].ids for row in rows])
        words = embedder.encoder.encode_words(tokens.to(embedder.device))[1]
        yield _Texts(torch.tensor(rows), words, [tokenized[row] for row in rows])


def parse_texts(embedder: Embedder, texts: Sequence[str]) -> list[Tree]:
    """The embedded parser's tree of each text. Where embeddings are cached, trees are too."""
    distinct = list(dict.fromkeys(texts))
    spans = embedder.ranks.broadcast(lambda: _parse(embedder, distinct))
    number = {text: row for row, text in enumerate(distinct)}
    return [tree_from_spans([Span(*span) for span in spans[number[text]]], text) for text in texts]


def _parse(embedder: Embedder, texts: Sequence[str]) -> list[list[tuple[Any, ...]]]:
    from powerclip.annotate.parsers import load_parser

    parser = load_parser("embedded")
    digest = hashlib.blake2b(json.dumps([parser.name, parser.version, *texts]).encode(), digest_size=20).hexdigest()
    path = None if embedder.cache is None else embedder.cache / f"{digest}.trees"
    if path is not None and path.is_file():
        found: list[list[tuple[Any, ...]]] = json.loads(path.read_text(encoding="utf-8"))
        return found
    parsed: list[list[tuple[Any, ...]]] = []
    for start in range(0, len(texts), BATCH):
        embedder.on_progress(start, total=len(texts))
        trees = parser.parse(texts[start : start + BATCH])
        parsed += [[(span.start, span.end, span.label) for span in tree.spans] for tree in trees]
    if path is not None:
        write_atomic(path, json.dumps(parsed).encode())
    return parsed
