"""In which order an endless stream of epochs shows the samples of many shards: a function of the seed and the position.

Each epoch shuffles the shards, deals them into windows of a few, and shuffles all samples of a window together. So at
any time only the files of one window are read (two at its edge), while neighbours in the stream still come from
anywhere in tens of thousands of samples. A position in the stream is a whole number: after n samples, n; epoch e holds
the positions e·n … (e+1)·n-1. Nothing else is needed to go on from there, and it does not matter which process asks for
which positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from powerclip.data.keyed_random import key_of, permutation, uniform

_SHARDS, _SAMPLES, _SUBSTITUTES = range(3)  # what a key is for


class SampleId(NamedTuple):
    """A sample in an epoch: which epoch, which shard, which of the shard's samples."""

    epoch: int
    shard: int
    number: int


@dataclass(frozen=True)
class _Window:
    """Shards whose samples are shuffled together, somewhere in an epoch."""

    start: int  # its first position in the epoch
    shards: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]  # samples of the window's first, first two, … shards
    order: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.order)

    def sample_at(self, epoch: int, at: int) -> SampleId:
        """The sample that the window shows as its `at`-th."""
        sample = int(self.order[at])
        shard = int(np.searchsorted(self.ends, sample, side="right"))
        first = int(self.ends[shard - 1]) if shard else 0
        return SampleId(epoch, int(self.shards[shard]), sample - first)


class StreamOrder:
    """The order of all epochs.

    Args:
        counts: samples of each shard.
        seed: of the order.
        window: how many shards are shuffled together.
    """

    def __init__(self, counts: Sequence[int], seed: int = 0, window: int = 8):
        self.counts = np.asarray(counts, np.int64)
        self.seed, self.window = seed, window
        self.samples = int(self.counts.sum())
        # A batch needs one epoch and one window, or two of them.
        self._epoch = lru_cache(4)(self._make_epoch)
        self._window = lru_cache(4)(self._make_window)

    def __getstate__(self) -> dict[str, object]:
        return {"counts": self.counts, "seed": self.seed, "window": self.window}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def sample_at(self, position: int) -> SampleId:
        """The sample at a position of the stream."""
        epoch, at = divmod(position, self.samples)
        window = self._window_at(epoch, at)
        return window.sample_at(epoch, at - window.start)

    def windows(self, position: int, stop: int) -> Iterator[tuple[int, list[int]]]:
        """The windows from the one at `position` to the one before `stop`: where each begins, and its shards."""
        while position < stop:
            epoch, at = divmod(position, self.samples)
            window = self._window_at(epoch, at)
            start = epoch * self.samples + window.start
            yield start, window.shards.tolist()
            position = start + len(window)

    def substitute(self, position: int, attempt: int, batch: range) -> SampleId:
        """What replaces a sample that cannot be used: another of its window, none of the same batch of positions.

        Each `attempt` 1, 2, … draws again. When the whole window is in the batch, any of its samples may be drawn.
        """
        epoch, at = divmod(position, self.samples)
        window = self._window_at(epoch, at)
        first = max(batch.start - epoch * self.samples - window.start, 0)
        end = min(batch.stop - epoch * self.samples - window.start, len(window))
        draw = uniform(key_of(self.seed, epoch, _SUBSTITUTES, position), attempt)
        others = len(window) - (end - first)
        if others <= 0:
            return window.sample_at(epoch, int(draw * len(window)))
        other = int(draw * others)
        return window.sample_at(epoch, other if other < first else other + end - first)

    def _window_at(self, epoch: int, at: int) -> _Window:
        starts = self._epoch(epoch)[1]
        return self._window(epoch, int(np.searchsorted(starts, at, side="right")) - 1)

    def _make_epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The shards in the order of an epoch, and where in it its windows begin. Empty windows are left out."""
        shards = permutation(key_of(self.seed, epoch, _SHARDS), len(self.counts))
        shards = shards[self.counts[shards] > 0]
        ends = np.cumsum(self.counts[shards])
        starts = np.concatenate([[0], ends])[: len(shards) : self.window]
        return shards, starts

    def _make_window(self, epoch: int, number: int) -> _Window:
        shards, starts = self._epoch(epoch)
        members = shards[number * self.window : (number + 1) * self.window]
        ends = np.cumsum(self.counts[members])
        order = permutation(key_of(self.seed, epoch, _SAMPLES, number), int(ends[-1]))
        return _Window(int(starts[number]), members, ends, order)
