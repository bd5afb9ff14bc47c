"""From a recipe to the loader of its batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from open_clip import CLIPTextCfg

from powerclip.data.batch import BatchSpec
from powerclip.data.corpus import TreeSidecars, find_trees
from powerclip.data.corpus_loader import CorpusLoader
from powerclip.data.loader import BatchLoader
from powerclip.data.paths import expand_pattern
from powerclip.data.scene_loader import SceneLoader
from powerclip.data.shard_loader import ShardLoader, ShardOptions
from powerclip.data.sidecar import Kind, find_sidecars, sidecar_path
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, tokenizer_for
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.train.data_cache import DataCache
from powerclip.train.inputs import existing_file, sidecar_folder
from powerclip.train.recipe import FLAT, DataSection, Recipe

# Each length of the token rows is compiled for on its own; without a compiler only the shape of matrices matters.
COMPILED_MULTIPLE, EAGER_MULTIPLE = 16, 8


def kept_size(image_size: tuple[int, int]) -> int:
    """How large images are kept for crops of `image_size`: 8/7 of it, the usual 256 for 224."""
    return round(max(image_size) * 8 / 7)


def make_loader(
    recipe: Recipe,
    encoder: DualEncoder,
    *,
    cache: DataCache | None = None,
    device: torch.device | str = "cpu",
    compiled: bool = False,
    ranks: Ranks = SINGLE,
    warn: Callable[[str], None] | None = None,
) -> BatchLoader:
    """The batches that a recipe describes, in the form that an encoder reads.

    `cache` keeps corpora for other runs; `device` is where a corpus is kept and cropped; `compiled` towers get fewer
    different lengths of captions; `ranks` share each batch; `warn` is called once for each kind of fault in shards.
    """
    spec = batch_spec(recipe, encoder, torch.device(device), compiled)
    tokenizer = _checked_tokenizer(encoder)
    cache = cache or DataCache()
    if recipe.data.source == "scenes":
        return SceneLoader(spec, tokenizer, ranks, "collective" if recipe.data.collective else "train")
    if recipe.data.source == "shards":
        return _shard_loader(recipe, spec, tokenizer, cache, ranks, warn)
    return _corpus_loader(recipe, spec, tokenizer, cache, ranks)


def batch_spec(recipe: Recipe, encoder: DualEncoder, device: torch.device, compiled: bool = False) -> BatchSpec:
    """The batches that a recipe describes, in the form that an encoder reads."""
    pixels = encoder.clip.visual.preprocess_cfg
    scenes = recipe.data.source == "scenes"
    return BatchSpec(
        image_size=encoder.image_size,
        grid=encoder.grid,
        batch_size=recipe.train.batch_size,
        regions=recipe.regions.count,
        largest_box=recipe.regions.largest,
        nodes=recipe.nodes,
        crop=recipe.data.crop,
        seed=recipe.data.seed,
        augment_seed=recipe.train.seed,
        mean=tuple(pixels["mean"]),
        std=tuple(pixels["std"]),
        length_multiple=COMPILED_MULTIPLE if compiled else 1 if scenes else EAGER_MULTIPLE,
        sort_by_length=device.type == "cuda" and not scenes,
        workers=recipe.data.workers,
        device=device,
    )


def _shard_loader(
    recipe: Recipe,
    spec: BatchSpec,
    tokenizer: CaptionTokenizer,
    cache: DataCache,
    ranks: Ranks,
    warn: Callable[[str], None] | None,
) -> ShardLoader:
    data = recipe.data
    shards = cache.shards(data, ranks)
    # Only PowerCLIP uses trees and regions; the other objectives need no annotation.
    options = ShardOptions(
        sidecars=sidecar_folder(data),
        trees=recipe.reads_trees and data.trees != FLAT,
        segments=recipe.reads_masks,
        window=data.window,
        strict=data.strict,
        max_bad=data.max_bad,
    )
    if options.trees:
        _check_sidecars(shards.paths, "trees", data)
    if options.segments:
        _check_sidecars(shards.paths, "regions", data)
    return ShardLoader(shards, spec, tokenizer, options, ranks, warn)


def _corpus_loader(
    recipe: Recipe, spec: BatchSpec, tokenizer: CaptionTokenizer, cache: DataCache, ranks: Ranks
) -> CorpusLoader:
    data = recipe.data
    assert data.shards is not None  # DataSection checks it
    paths = expand_pattern(data.shards, "data.shards")
    if recipe.reads_masks:
        _check_sidecars(paths, "regions", data)
    trees, note = corpus_trees(recipe, paths)
    corpus = cache.corpus(data.shards, "data.shards", kept_size(spec.image_size), trees, note)
    if recipe.reads_trees and trees is not None and corpus.trees_missing == len(corpus.captions):
        raise UserError(
            f"data.trees: none of {len(corpus.captions):,} captions has a tree that belongs to it ({note}); "
            f"{_annotate('trees', data)}, or set data.trees: {FLAT} to train with one phrase a caption"
        )
    packed = cache.packed(corpus, tokenizer, spec.nodes, spec.device)
    masks = cache.masks(corpus, data, spec.device) if recipe.reads_masks else None
    return CorpusLoader(packed, spec, masks, ranks)


def note_squashing(recipe: Recipe, encoder: DualEncoder) -> None:
    """Record in the model that it is trained on squashed images, so that its evaluation squashes them too."""
    if recipe.data.source == "corpus":
        encoder.clip.visual.preprocess_cfg = {**encoder.clip.visual.preprocess_cfg, "resize_mode": "squash"}


def _checked_tokenizer(encoder: DualEncoder) -> CaptionTokenizer:
    """The encoder's tokenizer; UserError when it has tokens that the text tower does not."""
    tokenizer = tokenizer_for(encoder)
    available = encoder.config["text_cfg"].get("vocab_size", CLIPTextCfg.vocab_size)
    needed = getattr(tokenizer, "vocab_size", 0)  # Hugging Face's have no such attribute
    if available < needed:
        raise UserError(f"model.config: text_cfg.vocab_size is {available}, but the tokenizer has {needed} tokens")
    return CaptionTokenizer(tokenizer)


def corpus_trees(recipe: Recipe, shards: Sequence[Path]) -> tuple[Path | TreeSidecars | None, str]:
    """Where the trees of a recipe's corpus are, and the same in words; None: every caption is one phrase.

    `data.trees` names a file, or says `flat`; without it the sidecars of the shards are read where there are any.

    Raises:
        UserError: there are none, and the objective needs them.
    """
    data = recipe.data
    if data.trees == FLAT:
        return None, "every caption is one phrase (data.trees: flat)"
    if data.trees is not None:
        path = existing_file(data.trees, "data.trees")
        return path, f"trees of {path}"
    folder = sidecar_folder(data)
    sidecars = find_trees(shards, folder)
    if sidecars is not None:
        return sidecars, f"trees of the sidecars {f'in {folder}' if folder else 'beside the shards'}"
    if recipe.reads_trees:
        _check_sidecars(shards, "trees", data)
    return None, ""


def _check_sidecars(shards: Sequence[Path], kind: Kind, data: DataSection) -> None:
    """UserError when no shard has the annotations that the recipe needs; some shards may lack them."""
    folder = sidecar_folder(data)
    if find_sidecars(shards, kind, folder):
        return
    where = f"in {folder}" if folder else "beside them"
    name = sidecar_path(shards[0], kind).name
    flat = f", or set data.trees: {FLAT} to train with one phrase a caption" if kind == "trees" else ""
    raise UserError(f"data.sidecars: no shard has its {kind} {where} (no {name}, …); {_annotate(kind, data)}{flat}")


def _annotate(kind: Kind, data: DataSection) -> str:
    """The command that makes the annotations of a recipe's shards."""
    sidecars = f" --sidecars {data.sidecars}" if data.sidecars else ""
    return f"make them with `powerclip annotate {kind} '{data.shards}'{sidecars}`"
