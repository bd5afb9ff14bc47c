"""Which model is meant: from what a person types to the towers, the weights and the preprocessing.

Every command and every recipe names models this way:

| written | model |
|---|---|
| `ViT-B-16`, `ViT-B-16/openai` | one of open_clip's, with random or with published weights |
| `DIR`, `local-dir:DIR` | a folder in open_clip's layout |
| `RUN` | a run: its final model or, where it was stopped, its newest good checkpoint |
| `RUN/checkpoints/step-000100.pt` | one checkpoint of a run, or a folder `step-000100` that ranks wrote in parts |
| `DIR` | a `CLIPModel` of Hugging Face |
| `hf-hub:ORG/NAME` | a model on the hub, of open_clip or a `CLIPModel` |
| `powerclip-scenes` | the small model that comes with this package: it knows the embedded scenes |
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powerclip.encoders import hugging_face
from powerclip.encoders.directory import CONFIG_FILE, read_config, stored
from powerclip.encoders.dual import DualEncoder
from powerclip.encoders.models import Blueprint, assemble, check_config, named, spelled_out, tags_of
from powerclip.encoders.transforms import Preprocess, Tokenizer, preprocess_for, tokenizer_for
from powerclip.encoders.weights import download, fit_weights, load_weights
from powerclip.errors import UserError, first_line
from powerclip.runtime.checkpoint_file import RUN_FILE, BadCheckpoint, by_step, is_checkpoint, read, read_sharded
from powerclip.runtime.shipped import MODEL, MODEL_FOLDER

_LOCAL = "local-dir:"
_HUB = "hf-hub:"

log = logging.getLogger(__name__)


def load(
    path_or_name: str | Path, pretrained: str | None = None, device: str | torch.device = "cpu"
) -> tuple[DualEncoder, Preprocess, Tokenizer]:
    """Load a model, ready for inference, with its image transform and its tokenizer.

    Args:
        path_or_name: an open_clip name (`ViT-B-16/laion2b_s34b_b88k`), a folder that this package or open_clip saved, a
            run's folder or one of its checkpoints, a model on the hub (`hf-hub:org/model`), or `powerclip-scenes`, the
            small one in this package.
        pretrained: with a name, the tag of its pretrained weights, a weights file, or a model with the same towers.
        device: where to put the model.

    Raises:
        UserError: nothing of that name, or a damaged or incomplete model.
    """
    blueprint = resolve(str(path_or_name), pretrained=pretrained)
    if blueprint.fill is None:
        log.warning("%s: no pretrained weights asked for, the model is initialised at random", path_or_name)
    model = _to_device(assemble(blueprint), device).eval()
    return model, preprocess_for(model), tokenizer_for(model)


def build(name: str | None = None, config: dict[str, Any] | None = None, pretrained: str | None = None) -> DualEncoder:
    """Make a dual encoder to train: from a model as `load` takes it, or from an open_clip model config.

    Args:
        name: an open_clip model with ViT towers, such as `ViT-B-16`, or any other model that `load` takes.
        config: instead of a name, the towers themselves: `embed_dim`, `vision_cfg` and `text_cfg` as in open_clip.
        pretrained: the weights. With a name, one of its tags; with a name or a config, a file with weights or a model
            that has the same towers; alone, any model, which brings its own towers. Random without it.

    Raises:
        UserError: an unknown name or tag, a config without ViT towers, weights that are not there or do not fit.

    Examples:
        >>> towers = {"embed_dim": 32, "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16,
        ...           "layers": 2}, "text_cfg": {"context_length": 16, "width": 32, "heads": 2, "layers": 2}}
        >>> build(config=towers).grid
        (4, 4)
    """
    return assemble(resolve(name, config, pretrained))


def resolve(name: str | None = None, config: dict[str, Any] | None = None, pretrained: str | None = None) -> Blueprint:
    """What `build` makes the towers from. Reads configs; weights are fetched when the towers are assembled.

    Raises:
        UserError: there is no such model; the message says what was looked for.
    """
    if name is not None and config is not None:
        raise UserError("a model is given by its name or by its config: one of the two")
    if name is None and config is None:
        if pretrained is None:
            raise UserError("a model is given by its name, by its config or by its pretrained weights")
        return _only_pretrained(pretrained)
    if name is not None:
        whole = _whole(name)
        if whole is not None and pretrained is not None:
            raise UserError(f"{name} brings its own weights: leave out pretrained={pretrained!r}")
        if whole is not None:
            return whole
        _refuse_weights_file(name, "path_or_name")
    start = _whole(pretrained) if pretrained is not None else None
    if name is not None:
        return named(name, pretrained) if start is None else _same_towers(named(name), start)
    assert config is not None
    towers = Blueprint(config, "the model config")
    if start is not None:
        return _same_towers(towers, start)
    if pretrained is None:
        return towers
    if not Path(pretrained).is_file():
        raise UserError(f"the model config: no weights file {pretrained}, and no folder or checkpoint of that name")
    return Blueprint(config, towers.source, fill=partial(load_weights, path=Path(pretrained), source=towers.source))


def _only_pretrained(source: str) -> Blueprint:
    blueprint = _whole(source)
    if blueprint is None:
        _refuse_weights_file(source, "pretrained")
        blueprint = named(source)
    if blueprint.fill is None:
        tags = ", ".join(tags_of(blueprint.source)) or "none"
        raise UserError(f"pretrained: {source} is a model without weights; add a tag, {source}/TAG (known: {tags})")
    return blueprint


def _refuse_weights_file(source: str, argument: str) -> None:
    if Path(source).expanduser().is_file():
        raise UserError(
            f"{source}: a file with weights does not say which towers they belong to, and it is no checkpoint of a "
            f"run: give the model's name or config too ({argument} takes a whole model)"
        )


def _whole(source: str) -> Blueprint | None:
    """The model, towers and weights, that a folder, a checkpoint or a hub holds; None when `source` is none of them."""
    if source.startswith(_HUB):
        return _on_hub(source.removeprefix(_HUB))
    path = Path(source.removeprefix(_LOCAL)).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if source == MODEL:
        return stored(MODEL_FOLDER)
    if is_checkpoint(path):
        return _from_checkpoint(path, read(path))
    if source.startswith(_LOCAL):
        raise UserError(f"{path}: no such directory")
    return None


# ---- folders ---------------------------------------------------------------------------------------------------------


def _in_folder(folder: Path) -> Blueprint:
    for place in (folder, folder / "model"):
        if (place / CONFIG_FILE).is_file():
            return stored(place)
    if hugging_face.is_clip_model(folder):
        return hugging_face.read_clip_model(folder)
    if (folder / RUN_FILE).is_file():
        return _from_checkpoint(folder, read_sharded(folder))
    for place in (folder / "checkpoints", folder):
        if files := by_step(place):
            return _newest_checkpoint(folder, files)
    state = "a run without a model yet" if (folder / "recipe.yaml").is_file() else "no model here"
    raise UserError(
        f"{folder}: {state}; looked for {CONFIG_FILE}, for config.json of a CLIPModel, and for model/{CONFIG_FILE} and "
        "checkpoints/step-* of a run"
    )


def _newest_checkpoint(folder: Path, files: list[Path]) -> Blueprint:
    """The model in the newest of `files` that is sound; bad ones are left where they are, for training to deal with."""
    problems: list[str] = []
    for path in reversed(files):
        try:
            blueprint = _from_checkpoint(path, read_sharded(path) if path.is_dir() else read(path))
        except BadCheckpoint as error:
            problems.append(str(error))
            continue
        for problem in problems:
            log.warning("%s; taking %s", problem, path.name)
        log.warning("%s: no final model, its weights are those of %s", folder, path.name)
        return blueprint
    more = f" (and {len(problems) - 1} older, bad as well)" if len(problems) > 1 else ""
    raise UserError(f"{problems[0]}{more}; no good checkpoint is left")


def _from_checkpoint(path: Path, saved: dict[str, Any]) -> Blueprint:
    model = saved.get("model")
    if not isinstance(model, dict):
        raise UserError(
            f"{path}: written by an earlier version of powerclip, which did not note the towers; continue the run with "
            "--resume, and its next checkpoint or its final model will load"
        )
    weights = {name.removeprefix("clip."): value for name, value in saved["encoder"].items()}
    return Blueprint(model["config"], str(path), model["preprocess"], _filler(weights, str(path)), path.parent)


def _filler(weights: dict[str, Tensor], source: str) -> Callable[[nn.Module], None]:
    return partial(fit_weights, weights=weights, where=source, source="their own config")


# ---- the hub ---------------------------------------------------------------------------------------------------------


def _on_hub(model_id: str) -> Blueprint:
    """A model of open_clip, or else a `CLIPModel`, on the hub or in its cache. Weights come when they are needed."""
    source = f"{_HUB}{model_id}"
    try:
        config = _fetch(model_id, CONFIG_FILE, source)
    except UserError as missing:
        try:
            folder = _fetch(model_id, hugging_face.CONFIG_FILE, source).parent
        except UserError as error:
            raise UserError(f"{missing}; looked for {hugging_face.CONFIG_FILE} of a CLIPModel too: {error}") from None
        return _clip_model_on_hub(model_id, folder, source)
    content = read_config(config)

    def fill(clip: nn.Module) -> None:
        # An empty name is open_clip's way to ask for the weights file under its usual names.
        load_weights(clip, _fetch(model_id, "", source), source, convert=True)

    return Blueprint(content["model_cfg"], source, content.get("preprocess_cfg") or {}, fill)


def _clip_model_on_hub(model_id: str, folder: Path, source: str) -> Blueprint:
    # All files of a model lie in one folder of the hub's cache.
    for name in hugging_face.SMALL_FILES:
        with contextlib.suppress(UserError):
            _fetch(model_id, name, source)
    blueprint = hugging_face.read_clip_model(folder, source)

    def fill(clip: nn.Module) -> None:
        if (folder / hugging_face.INDEX_FILE).is_file():
            for name in hugging_face.weight_files(folder):
                _fetch(model_id, name, source)
        else:
            first, second = hugging_face.WEIGHT_FILES
            try:
                _fetch(model_id, first, source)
            except UserError:
                _fetch(model_id, second, source)
        assert blueprint.fill is not None
        blueprint.fill(clip)

    return replace(blueprint, fill=fill)


def _fetch(model_id: str, name: str, source: str) -> Path:
    return download({"hf_hub": f"{model_id}/{name}"}, f"{name or 'the weights'} of {source}")


# ---- weights for towers that are already known -----------------------------------------------------------------------


def _same_towers(towers: Blueprint, start: Blueprint) -> Blueprint:
    """`start`, once it is sure that its towers are those that were asked for."""
    check_config(towers.config, towers.source)
    check_config(start.config, start.source)
    asked, given = spelled_out(towers.config), spelled_out(start.config)
    different = [key for key in asked if asked[key] != given.get(key)]
    if different:
        key = different[0]
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise UserError(
            f"{start.source} has other towers than {towers.source}: {key} is {given.get(key)} there and {asked[key]} "
            f"here{more}; leave out the name or config (null in a recipe) to take its own towers"
        )
    return start


def _to_device(model: DualEncoder, device: str | torch.device) -> DualEncoder:
    try:
        return model.to(device)
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"cannot use device {str(device)!r}: {first_line(error)}") from error
