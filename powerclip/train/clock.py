"""The speed of a run between two looks at it: samples a second, and how much of the time went into waiting for data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class StepClock:
    """Times the steps of a run that begins after `step`; what happens in `pause` does not count."""

    def __init__(self, step: int, batch_size: int):
        self._batch_size = batch_size
        self._since, self._step = time.perf_counter(), step
        self._waited = 0.0

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, the time it takes to get each of them noted.

        With a GPU that still works on earlier steps not all of it is lost: the share is an upper bound.
        """
        source = iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(source)
            except StopIteration:
                return
            self._waited += time.perf_counter() - asked
            yield batch

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what happens inside: the speed is that of training."""
        paused = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - paused

    def read(self, step: int) -> dict[str, float]:
        """`samples_per_second` and `data_wait`, a share of the time, since the last reading."""
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        found = {
            "samples_per_second": (step - self._step) * self._batch_size / seconds,
            "data_wait": min(1.0, self._waited / seconds),
        }
        self._since, self._step, self._waited = now, step, 0.0
        return found
