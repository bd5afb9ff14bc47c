"""`powerclip evaluate --score`: how the run that a model comes from compares images with texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from powerclip.alignment.config import PRESETS, AlignmentConfig
from powerclip.errors import UserError
from powerclip.evaluate.pair_scores import ScoreSettings
from powerclip.settings import check, parse_yaml
from powerclip.train.recipe import Recipe
from powerclip.train.run_folder import RunFolder

_LOCAL = "local-dir:"


def score_settings(
    model: str, score: str, *, rerank: int = 0, boxes: str | None = None, alignment: Sequence[str] = ()
) -> ScoreSettings:
    """The settings of a score: those of the model's run or, where it is none, the default; then what is given.

    Args:
        model: as `powerclip.load` takes it.
        score: global, late or powerset.
        rerank: how many of the best by global embeddings are scored; 0: all.
        boxes: `10`, so many random boxes, or `3x3`, all boxes of a grid.
        alignment: `key=value` of the alignment; a preset replaces all that the run has set.

    Raises:
        UserError: a setting is wrong, or the score needs what the model does not hold.
    """
    if score != "powerset" and (boxes is not None or alignment):
        raise UserError("--boxes and --alignment belong to --score powerset")
    recipe = recipe_of(model)
    chosen: dict[str, Any] = {"score": score, "rerank": rerank}
    if recipe is not None:
        chosen |= {"boxes": recipe.regions.count, "largest": recipe.regions.largest, "nodes": recipe.nodes}
        chosen["drawn"] = recipe.regions.drawn
        chosen["ends"] = bool(recipe.objective_settings.get("ends", True))
        if score == "powerset" and recipe.objective == "powerclip" and recipe.alignment.projection == "separate":
            raise UserError(
                f"{model} was trained with alignment.projection: separate, and a model does not hold those matrices: "
                "its powerset scores cannot be computed"
            )
    if boxes is not None:
        chosen |= _boxes(boxes)
    is_aligned = recipe is not None and recipe.objective == "powerclip"
    start = asdict(recipe.alignment) if recipe is not None and is_aligned else {}
    return ScoreSettings(**chosen, alignment=_alignment(start, alignment))


def recipe_of(model: str) -> Recipe | None:
    """The recipe of the run that a model is of: a run's folder, its model or one of its checkpoints; else None."""
    path = Path(model.removeprefix(_LOCAL)).expanduser()
    for folder in (path, *path.parents[:2]) if path.exists() else ():
        run = RunFolder(folder)
        if (path in (folder, run.model) or path.parent == run.checkpoints) and run.recipe.is_file():
            return run.read_recipe()
    return None


def _boxes(text: str) -> dict[str, int]:
    grid = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if grid and grid[1] == grid[2]:
        return {"grid": int(grid[1])}
    if not re.fullmatch(r"[1-9]\d*", text):
        raise UserError(f"--boxes: {text!r} is neither a number of random boxes, such as 10, nor a grid, such as 3x3")
    return {"boxes": int(text), "grid": 0}


def _alignment(start: dict[str, Any], changes: Sequence[str]) -> AlignmentConfig:
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"--alignment: {change!r} is not key=value (for example largest_set=0)")
        values[key] = parse_yaml(value, f"--alignment {key}")
    values = check(values, AlignmentConfig, "--alignment", "alignment")
    if values.get("preset") in PRESETS:
        start = {}
    try:
        return AlignmentConfig.named(**{**start, **values})
    except ValueError as error:
        raise UserError(f"--alignment: {error}") from None
