"""Recipes: a training run as one YAML file, typed, checked to the last key, extended rather than copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.regions import MOST_ENUMERATED
from powerclip.data.tokens import Nodes
from powerclip.errors import UserError
from powerclip.runtime.shipped import find_yaml, shipped_yaml
from powerclip.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    Share,
    build,
    check,
    parse_yaml,
    to_yaml,
    validate,
)

# What `evaluation.scenes: true` means.
DEFAULT_SCENES = 500

TOWERS = ("image", "text")  # as train.freeze names them
REDRAWN = (*TOWERS, "heads")  # as model.redraw names what is drawn anew

# As data.trees: every caption is one phrase; only stored trees are read.
FLAT, SIDECARS = "flat", "sidecars"


@dataclass(frozen=True)
class ModelSection:
    """Which towers: a model by name, an open_clip model config written out, or those that the weights come with."""

    name: str | None = None  # an open_clip model, such as ViT-B-16, or any model as in pretrained
    config: dict[str, Any] | None = None  # instead of a name: open_clip's embed_dim, vision_cfg and text_cfg
    # the weights: an open_clip tag or a file, for the name; or a folder, a run, a checkpoint, hf-hub:ORG/NAME or
    # NAME/TAG, which need no name; null: random weights
    pretrained: str | None = None
    # what of the pretrained model is drawn anew from train.seed: image or text, a whole tower, heads, both projections
    redraw: str | None = None

    def __post_init__(self) -> None:
        validate(self, "model")
        if self.name is not None and self.config is not None:
            raise ValueError("give either model.name or model.config (both are set; null unsets one)")
        if self.name is None and self.config is None and self.pretrained is None:
            raise ValueError("give either model.name or model.config, or model.pretrained alone (none is set)")
        if self.redraw is not None and self.name is None and self.pretrained is None:
            raise ValueError("model.redraw is for pretrained weights: set model.pretrained as well")
        parse_redraw(self.redraw)


@dataclass(frozen=True)
class DataSection:
    """Where the pairs come from."""

    # corpus: shards kept in memory; shards: read as needed; table: a file of paths and captions, or a folder
    source: Literal["scenes", "corpus", "shards", "table"] = "scenes"
    shards: str | None = None  # paths, patterns, braces or @list; environment variables in them are expanded
    table: str | None = None  # a CSV, TSV, JSONL or parquet file, a pattern, or a folder of NAME.jpg and NAME.txt
    image: str | None = None  # of a table: the column with images' paths, by its head or number; null: by known heads
    captions: str | None = None  # of a table: the columns with captions, with commas between them; null: by known heads
    # null: sidecars, and the embedded parser where there are none; sidecars: these only; flat: one phrase a caption; of
    # a corpus also a TSV file
    trees: str | None = None
    sidecars: str | None = None  # the folder of annotations and indices; null: beside the data
    cache: str | None = None  # folder of remote shards' copies, null: in the user's cache; of scenes: of what is drawn
    cache_size: PositiveFloat = 100.0  # of remote shards: gigabytes that their copies may take
    crop: PositiveShare = 0.9  # smallest share of an image that a crop keeps
    seed: NonNegativeInt = 0  # decides the order of the samples, or which scenes are drawn
    window: PositiveInt = 8  # of shards, and of a table's parts of 10,000 images: how many are shuffled together
    # threads that prepare batches ahead, 0: none; processes for shards, tables and, from 2, scenes
    workers: NonNegativeInt = 1
    collective: Share = 0.0  # of scenes: share with phrases for several objects ("both stars"); then sets are evaluated
    strict: bool = False  # of shards and tables: what is wrong with a sample or its annotation ends the run
    max_bad: Share = 0.1  # of shards and tables: largest share of samples, and of shards, that may be unusable
    samples: PositiveInt | None = None  # pairs in an epoch, for train.epochs; null: as many as are found

    def __post_init__(self) -> None:
        validate(self, "data")
        if self.source == "corpus" and not self.shards:
            raise ValueError("data.source is corpus: set data.shards to its tar files (for example data/train-*.tar)")
        if self.source == "corpus" and self.shards and "://" in self.shards:
            raise ValueError("data.source: corpus reads local shards; data.source: shards reads remote ones")
        if self.source == "shards" and not self.shards:
            raise ValueError("data.source is shards: set data.shards to them (for example /data/{00000..01242}.tar)")
        if self.source == "table" and not self.table:
            raise ValueError("data.source is table: set data.table to a .csv, .tsv, .jsonl, .parquet file or a folder")
        if self.source in ("shards", "table") and self.trees not in (None, FLAT, SIDECARS):
            raise ValueError("data.trees is a corpus' file; the trees of shards lie in sidecars (data.sidecars)")
        if self.source == "scenes" and self.trees == FLAT:
            raise ValueError("data.trees: scenes come with their trees; alignment.parse_trees: false goes without")


@dataclass(frozen=True)
class RegionsSection:
    """Which regions of an image take part (§3.2)."""

    kind: Literal["random", "segments"] = "random"  # segments: stored masks, topped up with random boxes
    count: PositiveInt = 10  # M, the regions of each image
    largest: PositiveShare = 1.0  # longest side of a box, as a share of the image's

    def __post_init__(self) -> None:
        validate(self, "regions")


@dataclass(frozen=True)
class OptimSection:
    """AdamW with linear warm-up and cosine decay; the numbers of the common CC12M recipe."""

    lr: Share = 1e-3  # peak learning rate; AdamW moves a weight by about this much in a step
    weight_decay: NonNegativeFloat = 0.2  # of matrices; gains, biases and scales do not decay
    beta1: Annotated[float, Range(ge=0, lt=1)] = 0.9  # decay of Adam's first moment
    beta2: Annotated[float, Range(ge=0, lt=1)] = 0.98  # decay of Adam's second moment
    eps: PositiveFloat = 1e-6  # added to Adam's denominator
    warmup: NonNegativeInt = 0  # steps of linear warm-up
    schedule: Literal["cosine", "constant"] = "cosine"  # the learning rate after the warm-up
    grad_clip: PositiveFloat | None = None  # largest norm of the gradient; null: no limit

    def __post_init__(self) -> None:
        validate(self, "optim")


@dataclass(frozen=True)
class TrainSection:
    """The length of the run, its hardware, and what it logs and keeps."""

    steps: PositiveInt = 1000  # updates of the run
    epochs: PositiveFloat | None = None  # instead of steps: passes over the data
    batch_size: Annotated[int, Range(ge=2)] = 128  # C, the pairs of a batch on all ranks; one has no negative
    seed: NonNegativeInt = 0  # decides the weights and the regions; the data have data.seed
    device: str = "auto"  # auto: a GPU when there is one
    # auto: bf16 on a GPU; fp8: bf16, with float8 products in the linear layers of the blocks, on a GPU that has them
    precision: Literal["auto", "float32", "bf16", "fp8"] = "auto"
    # the towers: as a whole, or each block by itself, which compiles in a quarter of the time; auto: whole, on a GPU,
    # and replayed as CUDA graphs where one process takes whole batches
    compile: Literal["auto", "always", "blocks", "never"] = "auto"
    accumulate: PositiveInt = 1  # parts in which a rank's share of a batch passes the towers; the loss sees all of it
    checkpoint_activations: bool = False  # compute the towers' activations again in the backward pass: less memory
    # FSDP: weights and optimiser sharded over all ranks, or over groups of ranks that hold one copy each
    sharding: Literal["none", "full", "hybrid"] = "none"
    shard_ranks: PositiveInt | None = None  # ranks of a group of sharding: hybrid; null: those of one machine
    mixed_precision_param: Literal["float32", "bf16"] = "float32"  # sharded weights as they are gathered and compute
    mixed_precision_reduce: Literal["float32", "bf16"] = "float32"  # gradients of sharded weights as they are summed
    # what stays as it is: image or text, a whole tower, or with :N its embeddings and first N blocks; image:8,text
    freeze: str | None = None
    layer_decay: PositiveShare = 1.0  # factor of the learning rate from a layer to the one below; heads have it full
    lora: NonNegativeInt = 0  # rank of the adapters that blocks are trained by instead of their weights (LoRA); 0: none
    lora_scale: PositiveFloat = 2.0  # what the adapters' products are multiplied with: LoRA's α over the rank
    log_every: PositiveInt = 10  # steps between two rows of metrics.jsonl
    checkpoint_every: NonNegativeInt = 100  # steps between checkpoints; 0: none by their count
    checkpoint_minutes: PositiveFloat | None = None  # a checkpoint is also written when the last one is this old
    # whole: one file, gathered on one rank, written in the background; sharded: a folder, each rank writes its part
    checkpoint_format: Literal["whole", "sharded"] = "whole"
    keep: PositiveInt = 2  # checkpoints that are kept, the newest
    max_skipped: NonNegativeInt = 10  # updates in a row that may be left out because something is not finite
    evaluate_every: NonNegativeInt = 0  # steps between evaluations; 0: only at the end
    save_model: bool = True  # false: the run keeps its results and no model
    wandb: str | None = None  # a Weights & Biases project that metrics go to as well

    def __post_init__(self) -> None:
        validate(self, "train")
        parse_freeze(self.freeze)
        if self.lora and self.layer_decay < 1:
            raise ValueError(
                "train.layer_decay is for weights that are trained, and train.lora trains none of the blocks'"
            )
        if self.lora and self.precision == "fp8":
            raise ValueError("train.precision: fp8 does not go with train.lora, whose weights do not train; take bf16")
        if self.lora and self.sharding != "none":
            raise ValueError(
                f"train.lora does not go with train.sharding: {self.sharding}; adapters leave little to shard"
            )
        unsharded = [
            f"train.{name}"
            for name in ("mixed_precision_param", "mixed_precision_reduce")
            if self.sharding == "none" and getattr(self, name) != "float32"
        ]
        if unsharded:
            raise ValueError(f"{unsharded[0]} is for sharded weights: set train.sharding to full or hybrid as well")
        if self.shard_ranks is not None and self.sharding != "hybrid":
            raise ValueError("train.shard_ranks is the size of a group of train.sharding: hybrid, which is not set")


@dataclass(frozen=True)
class EvaluationSection:
    """What is measured when the run ends, and every `train.evaluate_every` steps; by global embeddings, zero-shot."""

    retrieval: str | None = None  # held-out data: shards, written as data.shards are, or a table
    classification: str | None = None  # zero-shot: a folder of classes, or a tar or a folder of tars with labels
    composition: str | None = None  # a folder of SugarCrepe's files with the images in images/
    scenes: NonNegativeInt = 0  # embedded test scenes; 0: none, true: 500

    def __post_init__(self) -> None:
        validate(self, "evaluation")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run."""

    model: ModelSection  # the towers
    # the training method
    objective: Literal["clip", "powerclip", "flip", "a_clip", "e_clip", "clip_pgs", "filip", "sparc"] = "powerclip"
    objective_settings: dict[str, Any] = field(
        default_factory=dict
    )  # of the methods but powerclip, which has alignment
    nodes: Nodes = "phrases"  # all: single words that hang under a phrase are nodes too
    data: DataSection = field(default_factory=DataSection)  # the pairs
    regions: RegionsSection = field(default_factory=RegionsSection)  # the regions of an image
    alignment: AlignmentConfig = field(default_factory=AlignmentConfig)  # the loss of objective powerclip
    optim: OptimSection = field(default_factory=OptimSection)  # the optimiser
    train: TrainSection = field(default_factory=TrainSection)  # the run
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)  # what is measured

    def __post_init__(self) -> None:
        validate(self)
        if self.regions.kind == "segments" and self.data.source == "scenes":
            raise ValueError("regions.kind: segments needs masks in sidecars, and data.source: scenes has no shards")
        alignment = self.alignment
        enumerates = alignment.aggregation == "exact" and alignment.region_sets
        enumerates &= alignment.r2t or alignment.divides_by_lengths  # T2R by sums has a closed form
        if self.objective == "powerclip" and enumerates and self.regions.count > MOST_ENUMERATED:
            other = "" if alignment.divides_by_lengths else ", or aggregation: nla"
            raise ValueError(
                f"alignment.aggregation: exact goes through 2^M sets of regions, and regions.count is "
                f"{self.regions.count}: at most {MOST_ENUMERATED}{other}"
            )

    def with_towers(self, config: dict[str, Any]) -> Recipe:
        """The same recipe with its towers written out and no weights: nothing has to be found or read for them."""
        text = config["text_cfg"]
        own = {"hf_model_pretrained": False} if text.get("hf_model_name") else {}
        return replace(self, model=ModelSection(config={**config, "text_cfg": {**text, **own}}))

    @property
    def knows_steps(self) -> bool:
        """Whether the number of steps follows from the recipe alone; otherwise the data have to be counted."""
        return self.train.epochs is None or self.data.samples is not None

    @property
    def reads_trees(self) -> bool:
        """Whether training uses the trees of captions. The other objectives have no phrases."""
        return self.objective == "powerclip" and self.alignment.parse_trees

    @property
    def reads_masks(self) -> bool:
        """Whether training uses stored masks. The other objectives have no regions."""
        return self.objective == "powerclip" and self.regions.kind == "segments"


# Settings that may change when a run is resumed: they do not decide what it computes.
FREE_ON_RESUME = frozenset(
    f"{section}.{key}"
    for section, keys in {
        "data": ("cache", "cache_size", "max_bad", "strict", "workers"),
        "train": (
            *("accumulate", "checkpoint_activations", "checkpoint_every", "checkpoint_format", "checkpoint_minutes"),
            *("device", "evaluate_every", "keep", "log_every", "max_skipped", "save_model", "shard_ranks", "sharding"),
            "wandb",
        ),
        "evaluation": ("classification", "composition", "retrieval", "scenes"),
    }.items()
    for key in keys
)


def load_recipe(
    name: str | Path, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None, source: str = ""
) -> Recipe:
    """The recipe in a file, on top of what it extends, with `key=value` overrides on top of that.

    `changes` are nested values between the two, as a study file (`source`) writes them.
    """
    path = find_recipe(name)
    values: dict[str, Any] = {}
    for file, layer in _layers(path):
        _check_length(layer, str(file))
        values = _merge(values, _check(layer, str(file)))
    if changes is not None:
        values = _merge(values, _check(changes, source))
    values = _merge(values, _read_overrides(overrides))
    where = str(path) if changes is None else source
    where = f"{where} with {' '.join(overrides)}" if overrides else where
    recipe = _build(values, where)
    if recipe.knows_steps:
        try:
            check_warmup(recipe)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
    return recipe


def parse_recipe(text: str, where: str) -> Recipe:
    """The recipe in a YAML text that extends nothing, such as the snapshot in a run folder."""
    return _build(_check(parse_yaml(text, where), where), where)


def dump(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults included; `parse_recipe` reads it back."""
    return to_yaml(asdict(recipe))


def differences(old: Recipe, new: Recipe, *, counted: bool = True) -> list[str]:
    """What separates two recipes so that one cannot continue the other: `optim.lr: 0.001 → 0.002`, …

    `counted` says whether the steps of `new`, where they follow from epochs and the data, are known yet.
    """
    before, after = _flatten(asdict(old)), _flatten(asdict(new))
    unknown = set() if counted or new.knows_steps else {"train.steps"}
    return [
        f"{key}: {before.get(key)} → {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if key not in FREE_ON_RESUME | unknown and before.get(key) != after.get(key)
    ]


def parse_redraw(text: str | None) -> list[str]:
    """`text,heads` → the parts that are drawn anew. ValueError when it names something else."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if (text is not None and not parts) or set(parts) - set(REDRAWN):
        raise ValueError(f"model.redraw must name parts, such as text, heads or image,text, not {text!r}")
    return parts


def parse_freeze(text: str | None) -> dict[str, int | None]:
    """`image:8,text` → how many blocks of which tower are frozen; None: all of it. ValueError when it says nothing."""
    frozen: dict[str, int | None] = {}
    for part in text.split(",") if text else ():
        tower, colon, depth = part.strip().partition(":")
        if tower not in TOWERS or (colon and not depth.isdecimal()) or tower in frozen:
            raise ValueError(
                f"train.freeze must name towers and depths, such as image, text or image:8,text, not {text!r}"
            )
        frozen[tower] = int(depth) if colon else None
    return frozen


def steps_of(epochs: float, steps_per_epoch: int) -> int:
    """Steps in that many epochs of so many whole batches; ValueError when that is no training run."""
    steps = round(epochs * steps_per_epoch)
    if steps <= 1:
        batches = f"{steps_per_epoch:,} whole batch{'es' * (steps_per_epoch != 1)}"
        raise ValueError(
            f"train.epochs: {epochs:g} epochs of {batches} make {steps} step{'s' * (steps != 1)}: "
            "lower train.batch_size, raise train.epochs, or say how long with train.steps"
        )
    return steps


def find_recipe(name: str | Path) -> Path:
    """A recipe's file: the path as given, else a recipe that ships with the package (`quickstart/clip`)."""
    return find_yaml(name, "recipes")


def shipped_recipes() -> dict[str, Path]:
    """Name → file of the recipes that come with the package."""
    return shipped_yaml("recipes")


def _layers(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The chain of files that `path` extends, the farthest first, each with its own values."""
    layers: list[tuple[Path, dict[str, Any]]] = []
    visited: list[Path] = []
    while True:
        if path.resolve() in visited:
            chain = " → ".join(file.name for file, _ in reversed(layers))
            raise UserError(f"{path}: recipes extend each other in a circle ({path.name} → {chain})")
        visited.append(path.resolve())
        values = _read(path)
        parent = values.pop("extends", None)
        layers.insert(0, (path, values))
        if parent is None:
            return layers
        if not isinstance(parent, str):
            raise UserError(f"{path}: 'extends' must be the path of one recipe, got {parent!r}")
        if not (path.parent / parent).is_file():
            raise UserError(f"{path}: extends {parent}, but there is no file {path.parent / parent}")
        path = path.parent / parent


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file") from None
    values = parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a mapping of keys to values, not a {type(values).__name__}")
    return values


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"command line: {text!r} is not key=value (for example optim.lr=1e-3)")
    # YAML reserves @; here it begins a list of shards.
    nested: Any = value if value.startswith("@") else parse_yaml(value, f"command line, {key}")
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested  # type: ignore[no-any-return]


def _read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """All overrides of a command line as one layer, so that a preset among them undoes none of the others.

    Where two set the same key, the later one counts.
    """
    layer: dict[str, Any] = {}
    for override in overrides:
        layer = _merge(layer, _check(_parse_override(override), "command line"), presets=False)
    return layer


def _check(values: Any, where: str) -> dict[str, Any]:
    """The values of one layer, converted to the types of a recipe."""
    match values:
        case {"evaluation": {"scenes": bool(wanted)}}:
            values = {**values, "evaluation": {**values["evaluation"], "scenes": DEFAULT_SCENES if wanted else 0}}
    match values:
        case {"data": {"collective": bool(wanted)}}:
            values = {**values, "data": {**values["data"], "collective": float(wanted)}}
    return check(values, Recipe, where)


def _check_length(layer: Mapping[str, Any], where: str) -> None:
    train = layer.get("train")
    if isinstance(train, dict) and train.get("steps") is not None and train.get("epochs") is not None:
        raise UserError(f"{where}: train.steps and train.epochs both say how long; give one of them")


def _merge(
    below: Mapping[str, Any], above: Mapping[str, Any], *, top: bool = True, presets: bool = True
) -> dict[str, Any]:
    """The values of a layer over those of the layers below it; `presets`: one in it resets what they have set."""
    merged = dict(below)
    if top and isinstance(below.get("train"), dict) and "steps" in above.get("train", {}):
        # Steps and epochs both set the length: the upper layer decides.
        merged["train"] = {key: value for key, value in below["train"].items() if key != "epochs"}
    for key, value in above.items():
        # A preset sets all of them: it replaces what lower layers have set.
        fresh = top and presets and key == "alignment" and "preset" in value
        if not fresh and isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value, top=False)
        else:
            merged[key] = value
    return merged


def _build(values: dict[str, Any], where: str) -> Recipe:
    if "model" not in values:
        raise UserError(f"{where}: no model; set model.name, model.config or model.pretrained")
    try:
        alignment = AlignmentConfig.named(**values.get("alignment", {}))
        rest = {key: value for key, value in values.items() if key not in ("alignment", "objective_settings")}
        recipe = build(Recipe, {**rest, "alignment": asdict(alignment)})
        settings = _objective_settings(recipe.objective, values.get("objective_settings", {}), where)
        return replace(recipe, objective_settings=settings, train=_with_length(recipe))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def _with_length(recipe: Recipe) -> TrainSection:
    """The train section with the steps that follow from epochs, where the number of samples is given."""
    train, samples = recipe.train, recipe.data.samples
    if train.epochs is None or samples is None:
        return train
    if samples < train.batch_size:
        raise ValueError(f"train.batch_size is {train.batch_size}, but data.samples is only {samples}")
    return replace(train, steps=steps_of(train.epochs, samples // train.batch_size))


def check_warmup(recipe: Recipe) -> None:
    """ValueError when the run, of a known number of steps, ends before its learning rate has reached its peak."""
    warmup, steps = recipe.optim.warmup, recipe.train.steps
    if warmup > steps:
        raise ValueError(
            f"optim.warmup is {warmup:,} steps and the run only {steps:,}: the rate would never reach optim.lr; "
            f"set optim.warmup={steps // 10}, or train for longer"
        )


def _objective_settings(objective: str, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings, checked against those that the objective has, with defaults for the rest."""
    from powerclip.objectives import SETTINGS

    if objective in SETTINGS:
        kind = SETTINGS[objective]
        built: Any = build(kind, check(settings, kind, where, "objective_settings"))
        return asdict(built)
    if settings:
        other = "; its settings are under 'alignment'" if objective == "powerclip" else ""
        raise UserError(f"{where}: objective {objective} has no objective_settings.{next(iter(settings))}{other}")
    return {}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
