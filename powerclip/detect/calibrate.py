"""How much the tower's own opinion counts, chosen on base classes: no box of a novel class is looked at.

A quarter of the base classes that occur are held out, and a fifth of the images. A detector that has never seen these
classes is trained on the rest. On the held out images, all classes being candidates, the exponent of base classes is
that with the highest AP50 of the classes that it has seen, the exponent of novel classes that with the highest AP50 of
the classes that it has not.

Axes: K classes
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from powerclip.data.keyed_random import key_of, permutation
from powerclip.detect.average_precision import average_precision
from powerclip.detect.classes import Classes
from powerclip.detect.data import BoxSet
from powerclip.detect.detector import Detector, detections
from powerclip.detect.predict import find_boxes
from powerclip.detect.saved import Exponents
from powerclip.errors import UserError
from powerclip.runtime.files import write_atomic
from powerclip.runtime.progress import Progress

HELD_OUT = 4  # every fourth class, by how often it occurs
CHOSEN_ON = 5  # every fifth image
MOST_IMAGES = 1000  # that the exponents are chosen on
WEAK = 0.01  # AP50 below which a difference says nothing
GRID = tuple(k / 10 for k in range(11))
_AGAIN = "give the exponents, --exponents 0.2,0.45"


@dataclass(frozen=True)
class Parts:
    """The base classes and images, dealt into those that are learned and those that exponents are chosen on."""

    kept: BoxSet  # to learn from: its images, the boxes of its classes
    kept_labels: list[int]  # its classes, as labels of the whole
    rest: BoxSet  # to choose on: other images, all classes that occur, those held out as novel ones
    labels: list[int]  # its classes, as labels of the whole


@dataclass(frozen=True)
class Calibration:
    """What was chosen, and what it was chosen from."""

    exponents: Exponents
    held_out: tuple[str, ...]
    images: int
    base: tuple[float, ...]  # AP50 of the classes that were seen, for each exponent of `GRID`
    novel: tuple[float, ...]  # of those that were not

    def describe(self) -> str:
        """One line."""
        base, novel = (max(values) for values in (self.base, self.novel))
        return (
            f"exponents {self.exponents.base:g} (base) and {self.exponents.novel:g} (novel), chosen on {self.images:,} "
            f"images with {len(self.held_out)} of the base classes held out: AP50 {100 * base:.1f} of those seen, "
            f"{100 * novel:.1f} of those held out"
        )

    def warning(self) -> str | None:
        """What is to be said of a choice that the detector was too weak for."""
        weak = [name for name, values in (("base", self.base), ("novel", self.novel)) if max(values) < WEAK]
        if not weak:
            return None
        return (
            f"AP50 is below {100 * WEAK:g} % with every exponent of {' and of '.join(weak)} classes: the choice is "
            "mostly chance; train for longer, or give --exponents"
        )

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        write_atomic(path, (json.dumps({"grid": GRID, **asdict(self)}, indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Calibration | None:
        """What was written, or None where nothing was."""
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        chosen, names = Exponents(**content["exponents"]), tuple(content["held_out"])
        return cls(chosen, names, content["images"], tuple(content["base"]), tuple(content["novel"]))


def deal(learned: BoxSet, seed: int) -> Parts:
    """Hold classes and images of a set of base classes out.

    Raises:
        UserError: there are too few.
    """
    counts = learned.counts()
    # By frequency, so that both parts have frequent and rare classes.
    order = [label for label in counts.argsort(descending=True, stable=True).tolist() if counts[label]]
    held_out = set(order[HELD_OUT // 2 :: HELD_OUT])
    shuffled = permutation(key_of(seed, 0), len(learned)).tolist()
    chosen = sorted(shuffled[::CHOSEN_ON][:MOST_IMAGES])
    others = sorted(set(shuffled) - set(shuffled[::CHOSEN_ON]))
    labels, kept_labels = sorted(order), sorted(set(order) - held_out)
    if not held_out or not chosen or not others:
        raise UserError(
            f"{learned.source}: {len(order)} classes on {len(learned)} images are too few to choose exponents: {_AGAIN}"
        )
    rest = learned.take(chosen).only(labels)
    names = rest.classes.names
    rest = rest.with_classes(Classes(names, tuple(label in held_out for label in labels)))
    kept = learned.take(others).only(kept_labels).base()
    return Parts(kept, kept_labels, rest, labels)


def choose_exponents(detector: Detector, parts: Parts, texts: Tensor, *, quiet: bool = False) -> Calibration:
    """The exponents with the highest AP50 on the part that was held out; `texts` are its classes' [K, D].

    Raises:
        UserError: no box of a held out class is among its images.
    """
    data = parts.rest
    with Progress("exponents", len(data), unit="images", quiet=quiet, transient=True) as progress:
        found = dict(find_boxes(detector, data, texts, progress.advance))
    base, novel = [], []
    for exponent in GRID:
        both = torch.full((len(data.classes),), exponent)
        measured = average_precision(data, {number: detections(one, both) for number, one in found.items()}).scores
        if measured["ap50_base"] is None or measured["ap50_novel"] is None:
            raise UserError(f"{data.source}: too few boxes to choose exponents on: {_AGAIN}")
        base.append(measured["ap50_base"])
        novel.append(measured["ap50_novel"])
    held_out = tuple(name for name, novel in zip(data.classes.names, data.classes.novel, strict=True) if novel)
    chosen = Exponents(_best(base), _best(novel))
    return Calibration(chosen, held_out, len(data), tuple(base), tuple(novel))


def _best(values: Sequence[float]) -> float:
    """The smallest exponent that reaches the most."""
    return GRID[max(range(len(values)), key=lambda k: (values[k], -k))]
