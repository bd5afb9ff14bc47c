"""What a run writes down: rows once each, and a warning when alignment is dead."""

from __future__ import annotations

import pytest
import torch

from powerclip.train.metrics import WINDOW, CollapseWatch, MetricsLog, read_metrics


def test_rows_after_the_step_that_a_run_continues_from_are_written_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, tmp_path / "tb", after=0)
    for step in (1, 2, 3):
        log.write(step, {"loss": 10.0 + step})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    log = MetricsLog(path, tmp_path / "tb", after=2)
    log.write(3, {"loss": 0.5})
    log.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 11.0), (2, 12.0), (3, 0.5)]


def test_a_new_run_begins_with_an_empty_log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    MetricsLog(path, tmp_path / "tb", after=0).close()
    assert list(read_metrics(path)) == []


def feed(watch: CollapseWatch, violation: float, empty: float, steps: int) -> None:
    for _ in range(steps):
        watch.add({"violation": torch.tensor(violation), "empty": torch.tensor(empty)})


def test_dead_alignment_is_warned_of_once_after_a_whole_window():
    watch = CollapseWatch()
    feed(watch, 1.0, 1.0, WINDOW - 1)
    assert watch.warning() is None
    feed(watch, 1.0, 0.995, 1)
    assert "dead" in str(watch.warning())
    feed(watch, 1.0, 1.0, WINDOW)
    assert watch.warning() is None


def test_alignment_is_not_dead_while_either_share_stays_below_one():
    for violation, empty in ((1.0, 0.9), (0.9, 1.0)):
        watch = CollapseWatch()
        feed(watch, violation, empty, 2 * WINDOW)
        assert watch.warning() is None
    watch = CollapseWatch()
    feed(watch, 1.0, 1.0, WINDOW - 1)
    feed(watch, 0.5, 1.0, 1)
    feed(watch, 1.0, 1.0, WINDOW - 1)
    assert watch.warning() is None


def test_an_objective_without_alignment_is_not_watched():
    watch = CollapseWatch()
    for _ in range(2 * WINDOW):
        watch.add({"clip": torch.tensor(1.0)})
    assert watch.warning() is None


@pytest.mark.parametrize("damage", [b'{"step": 2, "lo', b"\xff\x80\n", b"5\n", b'{"loss": 1.0}\n'])
def test_rows_are_read_up_to_the_first_that_is_damaged(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + damage)
    assert list(read_metrics(path)) == [{"step": 1, "loss": 2.0}]
