"""Training steps to be timed: what training does, with the batch on the device already."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from powerclip.analysis.measure import Measurement, measure
from powerclip.data.batch import Batch
from powerclip.train.loop import train_step
from powerclip.train.recipe import Recipe
from powerclip.train.state import TrainState, start

# Appendix E, Table 13: an epoch's time relative to CLIP's.
PAPER = {"clip": 1.0, "sparc": 1.26, "filip": 1.41, "powerclip": 1.72}


@dataclass(frozen=True)
class Method:
    """A method with its towers, and the times that were taken of it."""

    state: TrainState
    recipe: Recipe
    times: list[Measurement] = field(default_factory=list)

    @classmethod
    def of(cls, recipe: Recipe) -> Method:
        """At its first step. The recipe's warm-up should be endless, so that the weights hardly move."""
        return cls(start(recipe), recipe)

    def step(self, batch: Batch) -> None:
        """Towers, loss, gradient, AdamW and what the method does after it."""
        train_step(self.state, batch, self.recipe)


def take_turns(
    methods: Mapping[str, Method],
    batch: Batch,
    rounds: int,
    repeats: int,
    say: Callable[[str, Measurement], object] = lambda name, found: None,
) -> None:
    """Time the methods, `repeats` steps of each in every round: a clock that slows down slows all of them."""
    for _ in range(rounds):
        for name, method in methods.items():
            method.times.append(measure(partial(method.step, batch), method.state.device, repeats, warmup=2))
            say(name, method.times[-1])


def beside_clip(methods: Mapping[str, Method]) -> list[dict[str, Any]]:
    """A row for each method; each round is compared with CLIP's of the same round."""
    rows = []
    for name, method in methods.items():
        ratios = [own.ms / clip.ms for own, clip in zip(method.times, methods["clip"].times, strict=True)]
        rows.append(
            {
                "method": name,
                "ms": statistics.median(time.ms for time in method.times),
                "relative": statistics.median(ratios),
                "smallest": min(ratios),
                "largest": max(ratios),
                "gib": method.times[-1].gib,
                "paper": PAPER.get(name),
            }
        )
    return rows
