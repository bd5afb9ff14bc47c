"""results.json: what was written is read back, and the time of a step is that of a typical one."""

from __future__ import annotations

import pytest

from powerclip.errors import UserError
from powerclip.train.results import Results, read_results, seconds_per_step, write_results


def test_results_are_read_back_as_they_were_written(tmp_path):
    results = Results(10, 3.5, 0.25, {"retrieval/mean_recall": 0.5}, {"loss": 1.5})
    write_results(tmp_path / "results.json", results)
    assert read_results(tmp_path / "results.json") == results


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"steps": 1}',
        '{"steps": 1, "more": 2}',
        '{"steps": 1, "seconds": 1, "seconds_per_step": null, "scores": null, "last": {}}',
        '{"steps": 1, "seconds": 1, "seconds_per_step": null, "scores": {"retrieval/mean_recall": "high"}, "last": {}}',
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(UserError, match=r"results\.json: not the results of a run"):
        read_results(tmp_path / "results.json")


def test_slow_first_steps_and_a_hiccup_do_not_count():
    speeds = [1, 2, 100, 100, 100, 1, 100]
    rows = [{"step": 1.0, "samples_per_second": float(speed)} for speed in speeds] + [{"step": 2.0, "evaluate/x": 1.0}]
    assert seconds_per_step(rows, batch_size=50) == 0.5
    assert seconds_per_step(rows[:1], batch_size=50) == 50
    assert seconds_per_step([], batch_size=50) is None


def test_results_of_the_old_metrics_are_told_from_damaged_ones(tmp_path):
    old = '{"steps": 1, "seconds": 1, "seconds_per_step": null, "scores": {"retrieval/mean": 0.5}, "last": {}}'
    (tmp_path / "results.json").write_text(old)
    with pytest.raises(UserError, match=r"results\.json: results of another version, with other metrics"):
        read_results(tmp_path / "results.json")
