"""How good is the approximation? NLA-T1 and NLA-T2 against the exact powerset, over τ and α (Figures 5 and 7).

Compared are T2R and R2T of all images with all captions (Figure 7), and the triplet loss of each pair: in its row and
in its column, Φγ(Q) and Φγ(Qᵀ) of Figure 5, and their sum. Pearson's r says whether the order is right, the bias
whether the values are: it is the mean difference to the exact values, in standard deviations of these.

Axes: C pairs of a batch · M regions · T nodes of all captions · D width
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import normalize, relu

from powerclip.alignment.contrast import off_diagonal
from powerclip.alignment.nla import nla_t1, nla_t2
from powerclip.alignment.phrases import Phrases, embed_leaves, embed_nodes
from powerclip.alignment.powerset import exact_r2t, exact_t2r
from powerclip.alignment.ragged import Segments
from powerclip.alignment.regions import embed_regions, random_boxes
from powerclip.data.batch import BatchSpec
from powerclip.data.corpus import find_trees, read_corpus
from powerclip.data.corpus_loader import CorpusLoader, pack_corpus
from powerclip.data.paths import expand_path, expand_pattern
from powerclip.data.scenes import Scene, test_scenes
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.errors import UserError
from powerclip.evaluate.nla_figure import losses_figure, nla_figure, scores_figure
from powerclip.report.heatmaps import save_png
from powerclip.report.table import NOTHING, Table
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import track

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

TAUS = (0.1, 0.01, 0.001)
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
GAMMA = 0.2
WIDTH = 512  # D of random vectors


@dataclass(frozen=True)
class NlaStudy:
    """What is compared: batches of random vectors and, if one is named, of a model's embeddings."""

    model: str | None = None  # a saved model or an open_clip name, as `powerclip.load` takes it
    shards: str | None = None  # a tar of images and captions, or a pattern; without it the model embeds scenes
    trees: str | None = None  # a TSV file of the captions' trees; without it the shards' sidecars, or flat trees
    batches: int = 8
    pairs: int = 16  # C, of each batch
    regions: int = 10  # M, random boxes
    seed: int = 0  # of the vectors, and of the choice of pairs and boxes


@dataclass(frozen=True)
class Agreement:
    """An approximation beside the exact values."""

    r: float | None  # Pearson's; None when either does not vary
    bias: float  # mean difference, in standard deviations of the exact values

    def __str__(self) -> str:
        return f"{NOTHING if self.r is None else format(self.r, '.4f')} ({self.bias:+.2f})"


@dataclass(frozen=True)
class Point:
    """One τ and α."""

    tau: float
    alpha: float
    t2r: Agreement
    r2t: Agreement
    rows: Agreement  # of Φγ(Q)
    columns: Agreement  # of Φγ(Qᵀ)
    loss: Agreement  # of their sum


@dataclass(frozen=True)
class AgreementGrid:
    """The agreement at every τ and α for one source of vectors, and all values for the figures.

    Values are named as in `Point`: t2r and r2t of all images with all captions, rows, columns and loss of each pair.
    """

    source: str
    pairs: int
    points: tuple[Point, ...]
    exact: dict[str, Tensor]
    approximate: dict[tuple[float, float], dict[str, Tensor]]  # τ, α → values

    def at(self, tau: float, alpha: float) -> Point:
        """The point of the grid."""
        return next(point for point in self.points if (point.tau, point.alpha) == (tau, alpha))

    def table(self) -> Table:
        """Pearson's r and the bias of T2R, R2T, the two terms of the loss and their sum."""
        rows = [
            [
                f"τ = {point.tau:g}, α = {point.alpha:g}",
                *map(str, (point.t2r, point.r2t, point.rows, point.columns, point.loss)),
            ]
            for point in self.points
        ]
        table = Table.plain(["", "T2R", "R2T", "Φ(Q)", "Φ(Qᵀ)", "loss"], rows)
        return replace(table, title=f"{self.source}: {self.pairs:,} pairs; Pearson r (bias in standard deviations)")


@dataclass(frozen=True)
class Vectors:
    """Regions and nodes of one batch, in float64 so that only the approximation differs."""

    regions: Tensor  # [C, M, D]
    nodes: Tensor  # [T, D]
    segments: Segments


def analyse(output: Path, study: NlaStudy, report: Callable[[str], None] | None = None) -> list[AgreementGrid]:
    """Compare as `study` says; write figures and `nla.json` into `output`, which is made if it is missing.

    `nla.png` is an overview, `nla-losses.png` the paper's Figure 5 and `nla-scores.png` its Figure 7.

    `report` is called with a line about the shards; without it no progress bar is shown.

    Raises:
        UserError: no such model, shards or trees; fewer images than needed; trees without shards.
    """
    shards, trees = _files(study)
    random = [random_vectors(study, batch) for batch in range(study.batches)]
    grids = [measure_agreement("random vectors", random)]
    if study.model is not None:
        source = "embedded scenes" if shards is None else _shard_names(shards)
        vectors = list(_model_batches(study, shards, trees, report))
        grids.append(measure_agreement(f"{study.model}, {source}", vectors))
    content = {
        "gamma": GAMMA,
        "regions": study.regions,
        "batches": study.batches,
        "pairs_in_batch": study.pairs,
        "seed": study.seed,
        "studies": [
            {"source": grid.source, "pairs": grid.pairs, "points": [asdict(point) for point in grid.points]}
            for grid in grids
        ],
    }
    write_atomic(output / "nla.json", (json.dumps(content, indent=1) + "\n").encode())
    save_png(nla_figure(grids), output / "nla.png")
    save_png(losses_figure(grids), output / "nla-losses.png")
    save_png(scores_figure(grids), output / "nla-scores.png")
    return grids


def measure_agreement(source: str, batches: Sequence[Vectors]) -> AgreementGrid:
    """Every τ and α on the same batches."""
    similarities = [torch.einsum("bmd,td->tbm", batch.regions, batch.nodes) for batch in batches]
    pairs = list(zip(similarities, (batch.segments for batch in batches), strict=True))
    exact = _values([(exact_t2r(q, segments), exact_r2t(q, segments)) for q, segments in pairs])
    points, approximate = [], {}
    for tau in TAUS:
        t2r = [nla_t1(q, segments, tau) for q, segments in pairs]
        for alpha in ALPHAS:
            r2t = [nla_t2(q, segments, tau, alpha) for q, segments in pairs]
            values = approximate[tau, alpha] = _values(list(zip(t2r, r2t, strict=True)))
            points.append(Point(tau, alpha, **{name: agreement(values[name], exact[name]) for name in exact}))
    return AgreementGrid(source, len(exact["loss"]), tuple(points), exact, approximate)


def _values(scores: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """What is compared, of the T2R and R2T of each batch."""
    terms = [loss_terms(t2r + r2t) for t2r, r2t in scores]
    rows, columns = (torch.cat(of_batches) for of_batches in zip(*terms, strict=True))
    t2r, r2t = (torch.cat([part.flatten() for part in of_batches]) for of_batches in zip(*scores, strict=True))
    return {"t2r": t2r, "r2t": r2t, "rows": rows, "columns": columns, "loss": rows + columns}


def loss_terms(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 8 for each pair [C]: the hinge of the hardest negative of its row, and of its column, of scores [C, C]."""
    positive = scores.diagonal()
    row, column = (off_diagonal(matrix).amax(1) for matrix in (scores, scores.T))
    return relu(row - positive + GAMMA), relu(column - positive + GAMMA)


def agreement(approximate: Tensor, exact: Tensor) -> Agreement:
    """Pearson's r and the bias."""
    std = exact.std()
    centred, centred_exact = approximate - approximate.mean(), exact - exact.mean()
    size = centred.norm() * centred_exact.norm()
    r = (centred @ centred_exact / size).item() if size > 0 else None
    return Agreement(r, ((approximate - exact).mean() / std).item() if std > 0 else 0.0)


def random_vectors(study: NlaStudy, batch: int, width: int = WIDTH) -> Vectors:
    """Random vectors for regions and words, with the trees of embedded scenes."""
    phrases, tokens = _phrases(_scenes(study, batch), CaptionTokenizer())
    generator = torch.Generator().manual_seed(study.seed * 1000 + batch)
    words = torch.randn(study.pairs, tokens.shape[1], width, generator=generator)
    regions = normalize(torch.randn(study.pairs, study.regions, width, generator=generator), dim=-1)
    return _vectors(regions, words, phrases)


@torch.inference_mode()
def scene_vectors(encoder: DualEncoder, tokenizer: CaptionTokenizer, study: NlaStudy, batch: int) -> Vectors:
    """A model's embeddings of embedded scenes, with random boxes as regions."""
    from powerclip.evaluate.scenes import scene_images

    scenes = _scenes(study, batch)
    phrases, tokens = _phrases(scenes, tokenizer)
    _, patches = encoder.encode_patches(scene_images(encoder, scenes))
    _, words = encoder.encode_words(tokens)
    generator = torch.Generator().manual_seed(study.seed * 1000 + batch)
    masks = random_boxes(study.pairs, study.regions, encoder.grid, generator)
    return _vectors(embed_regions(patches, masks), words, phrases)


@torch.inference_mode()
def corpus_vectors(encoder: DualEncoder, loader: CorpusLoader, batch: int) -> Vectors:
    """A model's embeddings of pairs of a corpus, read as in training."""
    pairs = loader.batch(batch)
    _, patches = encoder.encode_patches(pairs.images)
    _, words = encoder.encode_words(pairs.tokens)
    return _vectors(embed_regions(patches, pairs.regions), words, pairs.phrases)


def _files(study: NlaStudy) -> tuple[list[Path] | None, Path | None]:
    """The shards and the file of trees, checked before a model is loaded."""
    if study.shards is not None and study.model is None:
        raise UserError("--shards needs --model: whose embeddings of them are to be studied?")
    if study.trees is not None and study.shards is None:
        raise UserError("--trees belong to the captions of --shards: name these as well")
    shards = None if study.shards is None else expand_pattern(study.shards, "--shards")
    trees = None if study.trees is None else expand_path(study.trees, "--trees")
    if trees is not None and not trees.is_file():
        raise UserError(f"--trees: no file {trees}")
    return shards, trees


def _model_batches(
    study: NlaStudy, shards: Sequence[Path] | None, trees: Path | None, report: Callable[[str], None] | None
) -> Iterator[Vectors]:
    """The model's embeddings, batch by batch."""
    from powerclip.encoders import load

    encoder, _, open_clip_tokenizer = load(str(study.model))
    encoder.eval()
    tokenizer = CaptionTokenizer(open_clip_tokenizer)
    loader = None if shards is None else _corpus_loader(encoder, tokenizer, study, shards, trees, report)
    for batch in track(range(study.batches), "embedding", unit="batch", quiet=report is None):
        if loader is None:
            yield scene_vectors(encoder, tokenizer, study, batch)
        else:
            yield corpus_vectors(encoder, loader, batch)


def _corpus_loader(
    encoder: DualEncoder,
    tokenizer: CaptionTokenizer,
    study: NlaStudy,
    shards: Sequence[Path],
    trees: Path | None,
    report: Callable[[str], None] | None,
) -> CorpusLoader:
    """Whole images of the shards, each with one of its captions and random boxes."""
    sidecars = None if trees else find_trees(shards)
    corpus = read_corpus(shards, max(encoder.image_size), trees or sidecars, progress=report is not None)
    if report:
        note = "; trees of the sidecars beside the shards" if sidecars else ""
        report(f"{_shard_names(shards)}: {corpus.summary()}{note}")
    needed = study.batches * study.pairs
    if len(corpus.keys) < needed:
        possible = len(corpus.keys) // study.pairs
        advice = f"ask for --batches {possible}" if possible else "name more shards"
        raise UserError(
            f"--shards: {_shard_names(shards)} has {len(corpus.keys)} images that can be used, "
            f"but {study.batches} batches of {study.pairs} need {needed}: {advice}"
        )
    pixels = encoder.clip.visual.preprocess_cfg
    spec = BatchSpec(
        image_size=encoder.image_size,
        grid=encoder.grid,
        batch_size=study.pairs,
        regions=study.regions,
        crop=1.0,
        seed=study.seed,
        augment_seed=study.seed,
        mean=tuple(pixels["mean"]),
        std=tuple(pixels["std"]),
    )
    return CorpusLoader(pack_corpus(corpus, tokenizer), spec)


def _shard_names(shards: Sequence[Path]) -> str:
    """`val-000.tar`, or `train-000.tar … train-010.tar`."""
    return shards[0].name if len(shards) == 1 else f"{shards[0].name} … {shards[-1].name}"


def _scenes(study: NlaStudy, batch: int) -> list[Scene]:
    return list(test_scenes((batch + 1) * study.pairs, 0)[batch * study.pairs :])


def _phrases(scenes: Sequence[Scene], tokenizer: CaptionTokenizer) -> tuple[Phrases, Tensor]:
    tokenized = [tokenizer.encode(scene.caption) for scene in scenes]
    tokens = tokenizer.pad([caption.ids for caption in tokenized])
    return pack_phrases([scene.tree for scene in scenes], tokenized, tokens.shape[1]), tokens


def _vectors(regions: Tensor, words: Tensor, phrases: Phrases) -> Vectors:
    nodes = embed_nodes(embed_leaves(words, phrases), phrases)
    return Vectors(regions.double(), nodes.double(), phrases.node_segments)
