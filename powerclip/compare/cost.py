"""What a run has cost by each of its logged steps: samples, seconds of training, operations of the towers.

The paper's Figure 8 sets CLIP and PowerCLIP beside each other at the same time of training, not at the same step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from powerclip.errors import UserError
from powerclip.train.mfu import operations
from powerclip.train.recipe import Recipe


class RunCosts:
    """Adds costs to the rows that runs have logged. Operations are counted once for each recipe."""

    def __init__(self) -> None:
        self._operations: dict[tuple[str, int], float] = {}

    def add(
        self, rows: Sequence[Mapping[str, float]], recipe: Recipe, seconds_per_step: float | None
    ) -> list[dict[str, float]]:
        """The rows with `samples`, `seconds` and `flops` where an evaluation was logged.

        Seconds are those of the steps at the run's median speed: what compiles at the start, evaluations and
        checkpoints are not counted. A run that shared its GPU has no speed and gets no seconds.
        """
        if not any(_is_evaluation(row) for row in rows):
            return [dict(row) for row in rows]
        lengths = [row["batch/tokens"] for row in rows if "batch/tokens" in row]
        per_pair = self._per_pair(recipe, max(1, round(mean(lengths)))) if lengths else None
        costed = []
        for row in rows:
            samples = recipe.train.batch_size * row["step"]
            costs = {"samples": samples}
            if seconds_per_step is not None:
                costs["seconds"] = seconds_per_step * row["step"]
            if per_pair is not None:
                costs["flops"] = per_pair * samples
            costed.append({**row, **(costs if _is_evaluation(row) else {})})
        return costed

    def _per_pair(self, recipe: Recipe, length: int) -> float | None:
        key = (f"{recipe.model} {recipe.objective} {recipe.objective_settings} {recipe.alignment}", length)
        if key not in self._operations:
            try:
                self._operations[key] = operations(recipe, length)
            except (RuntimeError, UserError):  # towers that come with their weights, or that torch cannot count
                self._operations[key] = 0.0
        return self._operations[key] or None


def _is_evaluation(row: Mapping[str, float]) -> bool:
    return any(key.startswith("evaluate/") for key in row)
