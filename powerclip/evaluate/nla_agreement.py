"""How good is the approximation? NLA-T1 and NLA-T2 against the exact powerset, over τ and α (Figure 3, Appendix C).

Three things are compared: T2R and R2T of all images with all captions, and the triplet loss of each pair, summed over
both directions. Pearson's r says whether the order is right, the bias whether the values are: it is the mean difference
to the exact values, in standard deviations of these.

Axes: C pairs of a batch · M regions · T nodes of all captions · D width
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from powerclip.runtime.files import write_atomic

if TYPE_CHECKING:
    from powerclip.encoders import DualEncoder

TAUS = (0.1, 0.01, 0.001)
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
GAMMA = 0.2


@dataclass(frozen=True)
class Agreement:
    """An approximation beside the exact values."""

    r: float | None  # Pearson's; None when either does not vary
    bias: float  # mean difference, in standard deviations of the exact values


@dataclass(frozen=True)
class Point:
    """One τ and α."""

    tau: float
    alpha: float
    t2r: Agreement
    r2t: Agreement
    loss: Agreement


@dataclass(frozen=True)
class Study:
    """The grid for one source of vectors, and the losses of each pair for the figure."""

    source: str
    pairs: int
    points: tuple[Point, ...]
    exact: Tensor  # [pairs] losses
    approximate: dict[tuple[float, float], Tensor]  # τ, α → losses [pairs]

    def at(self, tau: float, alpha: float) -> Point:
        """The point of the grid."""
        return next(point for point in self.points if (point.tau, point.alpha) == (tau, alpha))


@dataclass(frozen=True)
class Vectors:
    """Regions and nodes of one batch, in float64 so that only the approximation differs."""

    regions: Tensor  # [C, M, D]
    nodes: Tensor  # [T, D]
    segments: Segments


def random_vectors(batch: int, count: int, regions: int, seed: int, width: int = 512) -> Vectors:
    """Random directions for regions and words, under the trees of embedded scenes."""
    scenes = _scenes(batch, count)
    tokenizer = CaptionTokenizer()
    generator = torch.Generator().manual_seed(seed * 1000 + batch)
    phrases, tokens = _phrases(scenes, tokenizer)
    words = torch.randn(count, tokens.shape[1], width, generator=generator)
    pictures = normalize(torch.randn(count, regions, width, generator=generator), dim=-1)
    return _vectors(pictures, words, phrases)


@torch.inference_mode()
def model_vectors(
    encoder: DualEncoder, tokenizer: CaptionTokenizer, batch: int, count: int, regions: int, seed: int
) -> Vectors:
    """A model's own embeddings of embedded scenes, with random boxes as regions."""
    from powerclip.evaluate.scenes import scene_images

    scenes = _scenes(batch, count)
    phrases, tokens = _phrases(scenes, tokenizer)
    _, patches = encoder.encode_patches(scene_images(encoder, scenes))
    _, words = encoder.encode_words(tokens)
    generator = torch.Generator().manual_seed(seed * 1000 + batch)
    masks = random_boxes(count, regions, encoder.grid, generator)
    return _vectors(embed_regions(patches, masks), words, phrases)


@torch.inference_mode()
def corpus_vectors(encoder: DualEncoder, loader: CorpusLoader, batch: int) -> Vectors:
    """A model's own embeddings of pairs of a corpus, read as in training."""
    pairs = loader.batch(batch)
    _, patches = encoder.encode_patches(pairs.images)
    _, words = encoder.encode_words(pairs.tokens)
    return _vectors(embed_regions(patches, pairs.regions), words, pairs.phrases)


def study(source: str, batches: Sequence[Vectors]) -> Study:
    """Every τ and α on the same batches."""
    similar = [torch.einsum("bmd,td->tbm", batch.regions, batch.nodes) for batch in batches]
    pairs = list(zip(similar, (batch.segments for batch in batches), strict=True))
    exact_t = [exact_t2r(q, segments) for q, segments in pairs]
    exact_r = [exact_r2t(q, segments) for q, segments in pairs]
    exact_losses = torch.cat([pair_losses(t + r) for t, r in zip(exact_t, exact_r, strict=True)])
    points, losses = [], {}
    for tau in TAUS:
        t2r = [nla_t1(q, segments, tau) for q, segments in pairs]
        for alpha in ALPHAS:
            r2t = [nla_t2(q, segments, tau, alpha) for q, segments in pairs]
            own = torch.cat([pair_losses(t + r) for t, r in zip(t2r, r2t, strict=True)])
            losses[tau, alpha] = own
            points.append(
                Point(
                    tau,
                    alpha,
                    t2r=agreement(_flat(t2r), _flat(exact_t)),
                    r2t=agreement(_flat(r2t), _flat(exact_r)),
                    loss=agreement(own, exact_losses),
                )
            )
    return Study(source, len(exact_losses), tuple(points), exact_losses, losses)


def pair_losses(scores: Tensor) -> Tensor:
    """Eq. 8 for each pair [C]: the hinges of the hardest negatives of its row and of its column, of scores [C, C]."""
    own = scores.diagonal()
    row, column = (off_diagonal(matrix).amax(1) for matrix in (scores, scores.T))
    return relu(row - own + GAMMA) + relu(column - own + GAMMA)


def agreement(approximate: Tensor, exact: Tensor) -> Agreement:
    """Pearson's r and the bias."""
    spread = exact.std()
    ours, theirs = approximate - approximate.mean(), exact - exact.mean()
    size = ours.norm() * theirs.norm()
    r = (ours @ theirs / size).item() if size > 0 else None
    return Agreement(r, ((approximate - exact).mean() / spread).item() if spread > 0 else 0.0)


def analyse(
    output: Path,
    model: str | None = None,
    *,
    shards: str | None = None,
    trees: str | None = None,
    batches: int = 8,
    count: int = 16,
    regions: int = 10,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> list[Study]:
    """Study random vectors and, if one is named, a model's; write `nla.png` and `nla.json` into `output`.

    Args:
        output: a folder; it is made if it is missing.
        model: a saved model or an open_clip name, as `powerclip.load` takes it.
        shards: a tar, or a pattern of several, of images and captions; without it the model embeds scenes.
        trees: a TSV file of the captions' trees; without it they are flat.
        batches: how many, of `count` pairs with `regions` random boxes each.
        seed: of the vectors, and of the choice of pairs and boxes.
        say: is told what the shards hold; a bar is shown with it.

    Raises:
        UserError: no such model, shards or trees; fewer images than asked for; trees without shards.
    """
    # What costs nothing to check is checked before the model is loaded.
    if shards is not None and model is None:
        raise UserError("--shards needs --model: whose embeddings of them are to be studied?")
    if trees is not None and shards is None:
        raise UserError("--trees belong to the captions of --shards: name these as well")
    paths = None if shards is None else expand_pattern(shards, "--shards")
    tree_file = None if trees is None else expand_path(trees, "--trees")
    if tree_file is not None and not tree_file.is_file():
        raise UserError(f"--trees: no file {tree_file}")

    studies = [study("random vectors", [random_vectors(batch, count, regions, seed) for batch in range(batches)])]
    if model is not None:
        from powerclip.encoders import load

        encoder, _, open_clip_tokenizer = load(model)
        encoder.eval()
        tokenizer = CaptionTokenizer(open_clip_tokenizer)
        steps = _shown(range(batches), say is not None)
        if paths is None:
            vectors = [model_vectors(encoder, tokenizer, batch, count, regions, seed) for batch in steps]
            studies.append(study(f"{model}, embedded scenes", vectors))
        else:
            loader = _pairs(encoder, tokenizer, paths, tree_file, batches, count, regions, seed, say)
            vectors = [corpus_vectors(encoder, loader, batch) for batch in steps]
            studies.append(study(f"{model}, {_named(paths)}", vectors))
    from powerclip.report.nla_figure import nla_figure

    content = {
        "gamma": GAMMA,
        "regions": regions,
        "batches": batches,
        "pairs_in_batch": count,
        "seed": seed,
        "studies": [
            {"source": one.source, "pairs": one.pairs, "points": [asdict(point) for point in one.points]}
            for one in studies
        ],
    }
    write_atomic(output / "nla.json", (json.dumps(content, indent=1) + "\n").encode())
    from powerclip.report.heatmaps import save_png

    save_png(nla_figure(studies), output / "nla.png")
    return studies


def lines(one: Study) -> list[str]:
    """The grid as text: r and bias of the three things."""
    shown = [f"{one.source}: {one.pairs:,} pairs; Pearson r (bias in standard deviations)"]
    shown.append(f"{'τ':>6} {'α':>5}  {'T2R':>15}  {'R2T':>15}  {'loss':>15}")
    for point in one.points:
        cells = [
            f"{'–' if part.r is None else format(part.r, '.4f')} ({part.bias:+.2f})"
            for part in (point.t2r, point.r2t, point.loss)
        ]
        shown.append(f"{point.tau:>6} {point.alpha:>5}  " + "  ".join(f"{cell:>15}" for cell in cells))
    return shown


def _pairs(
    encoder: DualEncoder,
    tokenizer: CaptionTokenizer,
    shards: Sequence[Path],
    trees: Path | None,
    batches: int,
    count: int,
    regions: int,
    seed: int,
    say: Callable[[str], None] | None,
) -> CorpusLoader:
    """Whole images of the shards, each with one of its captions and random boxes."""
    corpus = read_corpus(shards, max(encoder.image_size), trees or find_trees(shards), progress=say is not None)
    if say:
        say(f"{_named(shards)}: {corpus.summary()}")
    if len(corpus.keys) < batches * count:
        most = len(corpus.keys) // count
        advice = f"ask for --batches {most}" if most else "name more shards"
        raise UserError(
            f"--shards: {_named(shards)} has {len(corpus.keys)} images that can be used, "
            f"but {batches} batches of {count} need {batches * count}: {advice}"
        )
    pixels = encoder.clip.visual.preprocess_cfg
    spec = BatchSpec(
        image_size=encoder.image_size,
        grid=encoder.grid,
        batch_size=count,
        regions=regions,
        crop=1.0,
        seed=seed,
        augment_seed=seed,
        mean=tuple(pixels["mean"]),
        std=tuple(pixels["std"]),
    )
    return CorpusLoader(pack_corpus(corpus, tokenizer), spec)


def _named(shards: Sequence[Path]) -> str:
    """`val-000.tar`, or `train-000.tar … train-010.tar`."""
    return shards[0].name if len(shards) == 1 else f"{shards[0].name} … {shards[-1].name}"


def _shown(steps: Iterable[int], progress: bool) -> Iterator[int]:
    """The steps, with a bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console()
    hidden = not (progress and console.is_terminal)
    yield from track(list(steps), "embedding", console=console, disable=hidden, transient=True)


def _scenes(batch: int, count: int) -> list[Scene]:
    return list(test_scenes((batch + 1) * count, 0)[batch * count :])


def _phrases(scenes: Sequence[Scene], tokenizer: CaptionTokenizer) -> tuple[Phrases, Tensor]:
    tokenized = [tokenizer.encode(scene.caption) for scene in scenes]
    tokens = tokenizer.pad([caption.ids for caption in tokenized])
    return pack_phrases([scene.tree for scene in scenes], tokenized, tokens.shape[1]), tokens


def _vectors(regions: Tensor, words: Tensor, phrases: Phrases) -> Vectors:
    nodes = embed_nodes(embed_leaves(words, phrases), phrases)
    return Vectors(regions.double(), nodes.double(), phrases.node_segments)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])
