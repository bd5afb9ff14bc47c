"""What is measured of a run: speed and waiting, batches, memory, and a warning when the alignment is dead."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny

from powerclip.data.batch import Batch
from powerclip.data.tokens import CaptionTokenizer, pack_phrases
from powerclip.data.trees import parse_bracketed
from powerclip.train import statistics
from powerclip.train.loop import train
from powerclip.train.metrics import read_metrics
from powerclip.train.statistics import WINDOW, CollapseDetector, StepTimer, batch_statistics, memory


def test_trees_and_regions_are_described_by_their_means():
    captions = ["a dog on a chair", "dogs"]
    brackets = ["(NP (NP a dog) (PP on (NP a chair)))", "(NP dogs)"]
    trees = list(map(parse_bracketed, brackets, captions))
    tokenizer = CaptionTokenizer(context_length=16)
    tokenized = [tokenizer.encode(caption) for caption in captions]
    tokens = tokenizer.pad([caption.ids for caption in tokenized])
    regions = torch.zeros(2, 2, 4, dtype=torch.bool)
    regions[0] = True
    batch = Batch(torch.zeros(2, 3, 4, 4), tokens, regions, pack_phrases(trees, tokenized, tokens.shape[1]), ["a", "b"])
    found = batch_statistics(batch)
    # "a dog on a chair": nodes NP, NP, PP, NP; leaves "a dog", "on", "a chair"
    assert found["batch/nodes"] == (4 + 1) / 2
    assert found["batch/leaves"] == (3 + 1) / 2
    assert found["batch/flat_trees"] == 0.5
    assert found["batch/region_area"] == 0.5
    assert found["batch/tokens"] == (7 + 3) / 2  # with start and end of text


def test_host_memory_is_what_the_process_holds():
    before = memory(torch.device("cpu"))["host_gib"]
    held = torch.ones(64 * 2**20)  # 256 MiB
    assert memory(torch.device("cpu"))["host_gib"] - before == pytest.approx(0.25, abs=0.05)
    assert held[0] == 1


def test_every_logged_row_tells_speed_waiting_memory_and_what_the_batch_was(tmp_path):
    train(tiny(tmp_path), tmp_path / "run", quiet=True)
    expected = {
        "samples_per_second",
        "data_wait",
        "host_gib",
        "skipped",
        "batch/nodes",
        "batch/region_area",
        "violation",
    }
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert expected <= row.keys()
        assert 0 <= row["data_wait"] <= 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [100.0]
    monkeypatch.setattr(statistics.time, "perf_counter", lambda: time[0])
    return time


def test_samples_a_second_and_the_share_of_waiting_are_those_since_the_last_reading(now):
    def batches():
        for wait in (1.0, 3.0, 0.0):
            now[0] += wait
            yield wait

    timer = StepTimer(step=5, batch_size=8)
    source = timer.time_batches(batches())
    for _ in range(2):
        next(source)
        now[0] += 2.0  # the step itself
    assert timer.read(7) == {"samples_per_second": 2.0, "data_wait": 0.5}
    next(source)
    now[0] += 4.0
    assert timer.read(8) == {"samples_per_second": 2.0, "data_wait": 0.0}
    assert list(source) == []


def test_a_pause_does_not_count(now):
    timer = StepTimer(step=0, batch_size=10)
    now[0] += 1.0
    with timer.pause():
        now[0] += 50.0
    now[0] += 1.0
    assert timer.read(1)["samples_per_second"] == 5.0


def feed(detector: CollapseDetector, violation: float, empty: float, steps: int) -> None:
    for _ in range(steps):
        detector.add({"violation": torch.tensor(violation), "empty": torch.tensor(empty)})


def test_dead_alignment_is_warned_of_once_after_a_whole_window():
    detector = CollapseDetector()
    feed(detector, 1.0, 1.0, WINDOW - 1)
    assert detector.warning() is None
    feed(detector, 1.0, 0.995, 1)
    assert "dead" in str(detector.warning())
    feed(detector, 1.0, 1.0, WINDOW)
    assert detector.warning() is None


def test_alignment_is_not_dead_while_either_share_stays_below_one():
    for violation, empty in ((1.0, 0.9), (0.9, 1.0)):
        detector = CollapseDetector()
        feed(detector, violation, empty, 2 * WINDOW)
        assert detector.warning() is None
    detector = CollapseDetector()
    feed(detector, 1.0, 1.0, WINDOW - 1)
    feed(detector, 0.5, 1.0, 1)
    feed(detector, 1.0, 1.0, WINDOW - 1)
    assert detector.warning() is None


def test_an_objective_without_alignment_is_not_watched():
    detector = CollapseDetector()
    for _ in range(2 * WINDOW):
        detector.add({"clip": torch.tensor(1.0)})
    assert detector.warning() is None
