"""Speed and waiting, read between two looks; what is no training does not count."""

from __future__ import annotations

import pytest

from powerclip.train import clock
from powerclip.train.clock import StepClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: time[0])
    return time


def test_samples_a_second_and_the_share_of_waiting_are_those_since_the_last_reading(now):
    def batches():
        for wait in (1.0, 3.0, 0.0):
            now[0] += wait
            yield wait

    watched = StepClock(step=5, batch_size=8)
    source = watched.watch(batches())
    for _ in range(2):
        next(source)
        now[0] += 2.0  # the step itself
    assert watched.read(7) == {"samples_per_second": 2.0, "data_wait": 0.5}
    next(source)
    now[0] += 4.0
    assert watched.read(8) == {"samples_per_second": 2.0, "data_wait": 0.0}
    assert list(source) == []


def test_a_pause_does_not_count(now):
    watched = StepClock(step=0, batch_size=10)
    now[0] += 1.0
    with watched.pause():
        now[0] += 50.0
    now[0] += 1.0
    assert watched.read(1)["samples_per_second"] == 5.0
