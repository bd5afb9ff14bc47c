"""Recipes: a training run as one YAML file, typed, checked to the last key, extended rather than copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.regions import MOST_ENUMERATED
from powerclip.data.tokens import Nodes
from powerclip.errors import UserError
from powerclip.runtime.shipped import find_yaml, shipped_yaml
from powerclip.settings import (
    build,
    check,
    parse_yaml,
    to_yaml,
    validate,
)
from powerclip.train.sections import (
    DEFAULT_SCENES,
    DataSection,
    EvaluationSection,
    ModelSection,
    OptimSection,
    RegionsSection,
    TrainSection,
)


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
        if self.train.precompute and (self.data.source != "corpus" or self.data.crop != 1):
            raise ValueError(
                "train.precompute keeps tokens of whole images in memory: it needs data.source: corpus, data.crop: 1"
            )
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
