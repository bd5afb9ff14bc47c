"""What can be wrong with a sample, how it is counted, and when it is too much.

A *bad* sample cannot be used, and another replaces it. The others are used with what is left: an image that had
to be converted, a caption without its tree (it is one phrase), an image without its masks (random boxes).
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from powerclip.errors import UserError


class Fault(StrEnum):
    """By the name under which it is counted and logged."""

    TRUNCATED = "bad/truncated_image"
    UNREADABLE = "bad/unreadable_image"
    TOO_LARGE = "bad/too_large_image"
    NO_CAPTION = "bad/no_caption"
    BINARY_CAPTION = "bad/binary_caption"
    LOST = "bad/unreadable_shard"
    MISSING = "bad/missing_image"

    CMYK = "converted/cmyk"
    DEEP = "converted/16_bit"
    ANIMATED = "converted/animated"

    TREES_MISSING = "trees/no_sidecar"
    TREES_UNUSABLE = "trees/unusable_sidecar"
    TREES_NO_ROW = "trees/no_row"
    TREES_STALE = "trees/stale"
    TREES_BROKEN = "trees/broken"

    REGIONS_MISSING = "regions/no_sidecar"
    REGIONS_UNUSABLE = "regions/unusable_sidecar"
    REGIONS_NO_ROW = "regions/no_row"
    REGIONS_STALE = "regions/stale"
    REGIONS_BROKEN = "regions/broken"

    @property
    def is_bad(self) -> bool:
        """Whether the sample cannot be used."""
        return self.startswith("bad/")

    @property
    def remedy(self) -> str:
        """What is done about it."""
        if self.is_bad:
            return "another sample replaces it"
        return {"converted": "converted", "trees": "taken as one phrase", "regions": "random boxes"}[self.split("/")[0]]


# Counted beside the faults, for whatever reason: captions that are one phrase though trees were asked for, and regions
# that are random boxes though segments were.
FLAT_TREES = "flat_trees"
TOPPED_UP = "topped_up"


class BadSample(Exception):
    """A sample that cannot be used."""

    def __init__(self, fault: Fault, detail: str):
        super().__init__(detail)
        self.fault, self.detail = fault, detail


@dataclass
class FaultReport:
    """The faults of some samples, small enough to send between processes for every batch."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[Fault, str] = field(default_factory=dict)  # where each kind was met first, and what it looked like
    bad: list[tuple[int, int, int]] = field(default_factory=list)  # epoch, shard and number of the bad samples

    def add(self, fault: Fault, where: str, detail: str = "") -> None:
        """Count a fault of the sample at `where`."""
        self.counts[fault] += 1
        if fault not in self.first:
            self.first[fault] = f"{where}: {detail}" if detail else where


class FaultWatch:
    """Counts the faults of a run: warns of each kind once, and ends the run when a shard has too many bad samples.

    Args:
        counts: samples of each shard.
        names: of the shards.
        strict: any fault ends the run.
        max_bad: largest share of a shard that may be bad.
        world_size: ranks that share the samples; each sees its part.
        warn: called once for each kind; the log `powerclip.data` by default.
    """

    def __init__(
        self,
        counts: Sequence[int],
        names: Sequence[str],
        *,
        strict: bool = False,
        max_bad: float = 1.0,
        world_size: int = 1,
        warn: Callable[[str], None] | None = None,
    ):
        self._counts, self._names = counts, names
        self._strict, self._max_bad, self._world_size = strict, max_bad, world_size
        self._warn = warn or logging.getLogger("powerclip.data").warning
        self._warned: set[Fault] = set()
        self._bad: dict[tuple[int, int], set[int]] = defaultdict(set)  # (epoch, shard) → numbers

    def check(self, report: FaultReport) -> None:
        """Count a batch's faults.

        Raises:
            UserError: a fault, when strict; or a shard with too many bad samples.
        """
        for fault, where in report.first.items():
            if self._strict:
                raise UserError(f"{where} ({fault}); data.strict: false goes on ({fault.remedy})")
            if fault not in self._warned:
                self._warned.add(fault)
                self._warn(f"{where}; {fault.remedy}. More are counted as {fault}")
        for epoch, shard, number in report.bad:
            numbers = self._bad[epoch, shard]
            numbers.add(number)
            if len(numbers) > self._limit(shard):
                raise UserError(
                    f"shard {self._names[shard]}: {len(numbers):,} of {self._counts[shard]:,} samples are bad so far, "
                    f"more than data.max_bad ({self._max_bad:g}) allows ({_kinds(report)}); copy the shard again, "
                    "leave it out of data.shards, or raise data.max_bad"
                )
        if report.bad:
            newest = max(epoch for epoch, _, _ in report.bad)
            for past in [key for key in self._bad if key[0] < newest - 1]:
                del self._bad[past]

    def _limit(self, shard: int) -> float:
        """How many bad samples of a shard one rank may meet in an epoch."""
        seen = self._counts[shard] / self._world_size
        allowed = self._max_bad * seen
        # A rank of many meets a few samples of each shard: four standard deviations, or chance would end the run.
        return allowed + (4 * math.sqrt(allowed) if self._world_size > 1 else 0)


def _kinds(report: FaultReport) -> str:
    return "; ".join(f"{where} ({fault})" for fault, where in report.first.items() if fault.is_bad)
