"""How long a run is: steps as the recipe says them, or as they follow from passes over the data."""

from __future__ import annotations

from dataclasses import replace

from powerclip.data.loader import BatchLoader
from powerclip.errors import UserError
from powerclip.train.recipe import Recipe, steps_of


def with_steps(recipe: Recipe, loader: BatchLoader) -> Recipe:
    """The recipe with `train.steps` settled: where it gives epochs and no number of samples, the data are counted.

    Raises:
        UserError: the data have no end.
    """
    settings = recipe.train
    if settings.epochs is None or recipe.data.samples is not None:
        return recipe
    steps = getattr(loader, "steps_per_epoch", None)
    if steps is None:
        raise UserError(
            f"train.epochs: data.source {recipe.data.source} has no end; give train.steps, or data.samples for an epoch"
        )
    return replace(recipe, train=replace(settings, steps=steps_of(settings.epochs, steps)))
