"""From a recipe to the loader of its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from open_clip import CLIPTextCfg

from powerclip.data.batch import BatchSpec
from powerclip.data.columns import Columns
from powerclip.data.corpus import TreeSidecars, find_trees
from powerclip.data.corpus_loader import CorpusLoader
from powerclip.data.loader import BatchLoader
from powerclip.data.remote_shards import RemoteShards
from powerclip.data.scene_loader import SceneLoader
from powerclip.data.shard_loader import ShardLoader, ShardOptions
from powerclip.data.shards import ShardSet, expand_shards
from powerclip.data.sidecar import Kind, find_sidecars, sidecar_path
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import DualEncoder, tokenizer_for
from powerclip.errors import UserError
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.train.data_cache import DataCache
from powerclip.train.inputs import Input, cache_folder, count_samples, existing_file, sidecar_folder
from powerclip.train.recipe import Recipe
from powerclip.train.sections import FLAT, SIDECARS, DataSection
from powerclip.train.trees import TreeFolder, check_trees

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
        kept = None if recipe.data.cache is None else cache_folder(recipe.data)
        return SceneLoader(spec, tokenizer, ranks, recipe.data.collective, kept)
    if recipe.data.source in ("shards", "table"):
        return _shard_loader(recipe, spec, tokenizer, cache, ranks, warn)
    loader = _corpus_loader(recipe, spec, tokenizer, cache, ranks)
    if recipe.train.precompute:
        loader.tokens = cache.tokens(loader, encoder, recipe.train)
    return loader


def batch_spec(recipe: Recipe, encoder: DualEncoder, device: torch.device, compiled: bool = False) -> BatchSpec:
    """The batches that a recipe describes, in the form that an encoder reads."""
    pixels = encoder.clip.visual.preprocess_cfg
    scenes = recipe.data.source == "scenes"
    return BatchSpec(
        image_size=encoder.image_size,
        grid=encoder.grid,
        batch_size=recipe.train.batch_size,
        regions=recipe.regions.count,
        drawn=recipe.regions.drawn,
        largest_box=recipe.regions.largest,
        nodes=recipe.nodes,
        crop=recipe.data.crop,
        seed=recipe.data.seed,
        augment_seed=recipe.train.seed,
        mean=tuple(pixels["mean"]),
        std=tuple(pixels["std"]),
        length_multiple=COMPILED_MULTIPLE if compiled else 1 if scenes else EAGER_MULTIPLE,
        sort_by_length=not scenes,
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
    reads_trees = recipe.reads_trees and data.trees != FLAT
    if data.source == "table":
        shards: ShardSet = cache.tables(data)
    else:
        shards = cache.shards(data, ranks, trees=reads_trees, regions=recipe.reads_masks)
    if reads_trees and data.trees == SIDECARS:
        _check_sidecars(shards.paths, "trees", data)
        trees = TreeFolder(sidecar_folder(data), "trees of the sidecars")
    elif reads_trees:
        remote = shards.cache if isinstance(shards, RemoteShards) else None
        trees = cache.trees([str(path) for path in shards.paths], data, ranks, samples=shards.samples, cache=remote)
    else:
        trees = TreeFolder(None, "")
    # Only PowerCLIP uses trees and regions; the other objectives need no annotation.
    options = ShardOptions(
        sidecars=sidecar_folder(data),
        tree_folder=trees.folder,
        trees=reads_trees,
        segments=recipe.reads_masks,
        window=data.window,
        strict=data.strict,
        max_bad=data.max_bad,
    )
    if reads_trees:
        check_trees(shards, trees, f"{_annotate('trees', data)}, or set data.trees: {FLAT} to train without phrases")
    if options.segments and not isinstance(shards, RemoteShards):  # remote masks come with each shard
        _check_sidecars(shards.paths, "regions", data)
    return ShardLoader(shards, spec, tokenizer, options, ranks, warn)


def _corpus_loader(
    recipe: Recipe, spec: BatchSpec, tokenizer: CaptionTokenizer, cache: DataCache, ranks: Ranks
) -> CorpusLoader:
    data = recipe.data
    assert data.shards is not None  # DataSection checks it
    paths = expand_shards(data.shards, "data.shards")
    if recipe.reads_masks:
        _check_sidecars(paths, "regions", data)
    trees, note = corpus_trees(recipe, paths, cache, ranks)
    said = note if data.trees is not None else ""  # what the parser did was said when it did it
    corpus = cache.corpus(data.shards, "data.shards", kept_size(spec.image_size), trees, said)
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
    text = encoder.config["text_cfg"]
    if text.get("hf_model_name"):
        return CaptionTokenizer(tokenizer)  # it comes with its own tower
    available = text.get("vocab_size", CLIPTextCfg.vocab_size)
    needed = getattr(tokenizer, "vocab_size", 0) or len(getattr(tokenizer, "tokenizer", ()))
    if available < needed:
        raise UserError(f"model.config: text_cfg.vocab_size is {available}, but the tokenizer has {needed} tokens")
    return CaptionTokenizer(tokenizer)


def corpus_trees(
    recipe: Recipe, shards: Sequence[Path], cache: DataCache, ranks: Ranks = SINGLE
) -> tuple[Path | TreeSidecars | None, str]:
    """Where the trees of a recipe's corpus are, and the same in words; None: every caption is one phrase.

    `data.trees` names a file, or says `flat` or `sidecars`; without it the sidecars of the shards are read, and made
    where there are none and the objective needs them.

    Raises:
        UserError: there are none, and the objective needs them.
    """
    data = recipe.data
    if data.trees == FLAT:
        return None, "every caption is one phrase (data.trees: flat)"
    if data.trees not in (None, SIDECARS):
        assert data.trees is not None
        path = existing_file(data.trees, "data.trees")
        return path, f"trees of {path}"
    if recipe.reads_trees and data.trees is None:
        samples = count_samples([path for path in shards if path.is_file()])
        made = cache.trees([str(path) for path in shards], data, ranks, samples=samples)
        return TreeSidecars(made.folder), made.note
    folder = sidecar_folder(data)
    sidecars = find_trees(shards, folder)
    if sidecars is not None:
        return sidecars, f"trees of the sidecars {f'in {folder}' if folder else 'beside the data'}"
    if recipe.reads_trees:
        _check_sidecars(shards, "trees", data)
    return None, ""


def annotation_inputs(recipe: Recipe, shards: Sequence[Path]) -> Iterator[Input]:
    """Where the trees and the regions of a run come from, or why they are missing; for data that are there."""
    data = recipe.data
    if recipe.reads_trees:
        yield _annotation("trees", lambda: _tree_source(recipe, shards))
    if recipe.reads_masks and shards:
        yield _annotation("regions", lambda: _mask_source(shards, data))


def _annotation(name: str, find: Callable[[], str]) -> Input:
    try:
        return Input(name, find())
    except UserError as error:
        return Input(name, "", problem=str(error))


def _tree_source(recipe: Recipe, shards: Sequence[Path]) -> str:
    """Where `make_loader` would find the trees; nothing is parsed here."""
    data = recipe.data
    if data.source == "scenes":
        return "the scenes' own"
    if data.trees == FLAT:
        return f"every caption is one phrase (data.trees: {FLAT})"
    if data.trees == SIDECARS:
        _check_sidecars(shards, "trees", data)
    elif data.trees is not None:
        return str(existing_file(data.trees, "data.trees"))
    if data.source == "table" or not find_sidecars(shards, "trees", sidecar_folder(data)):
        return "sidecars where there are some, the embedded parser for the rest"
    return _sidecars_found(shards, "trees", data)


def _mask_source(shards: Sequence[Path], data: DataSection) -> str:
    _check_sidecars(shards, "regions", data)
    return _sidecars_found(shards, "regions", data)


def _sidecars_found(shards: Sequence[Path], kind: Kind, data: DataSection) -> str:
    folder = sidecar_folder(data)
    found = sum(sidecar_path(shard, kind, folder).exists() for shard in shards)
    return f"{found:,} of {len(shards):,} sidecars {f'in {folder}' if folder else 'beside the data'}"


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
    names = "".join(f" --caption-column {name}" for name in Columns.named(None, data.captions).captions)
    columns = (f" --image-column {data.image}" if data.image else "") + names
    return f"make them with `powerclip annotate {kind} '{data.table or data.shards}'{sidecars}{columns}`"
