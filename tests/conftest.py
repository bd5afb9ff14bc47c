"""What tests of several packages share: a corpus made in a moment, and the real data where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from mini_corpus import write_mini_corpus

# A deadline measures the machine, not the code: property tests must pass on a busy one.
settings.register_profile("powerclip", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("powerclip")


@pytest.fixture(scope="session")
def mini_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shards, trees and comparisons of `mini_corpus.py`."""
    return write_mini_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with captions10k/ and sugarcrepe/; its tests are skipped without it."""
    folder = os.environ.get("POWERCLIP_DATA")
    if not folder:
        pytest.skip("real data: set POWERCLIP_DATA to the folder that holds captions10k/ and sugarcrepe/")
    return Path(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none. `make test-gpu` runs these tests and those of the kernels."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of progress bars, at 0 until the test sets `clock.now`."""
    clock = Clock()
    monkeypatch.setattr("powerclip.runtime.progress.time.monotonic", clock)
    return clock
