"""results.json: what was written is read back, and the time of a step is that of a typical one."""

from __future__ import annotations

import pytest

from powerclip.errors import UserError
from powerclip.train.evaluation import describe
from powerclip.train.results import Results, read_results, seconds_per_step, write_results


def test_results_are_read_back_as_they_were_written(tmp_path):
    results = Results(10, 3.5, 0.25, {"retrieval/mean": 0.5}, {"loss": 1.5})
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
        '{"steps": 1, "seconds": 1, "seconds_per_step": null, "scores": {"retrieval/mean": "high"}, "last": {}}',
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


def test_scores_become_one_line():
    scores = {
        "retrieval/mean": 0.127,
        "retrieval/text_r1": 0.05,
        "retrieval/image_r1": 0.041,
        "composition/mean": 0.55,
        "composition/error": 0.022,
        "scenes/retrieval": 0.5,
        "scenes/pointing": 0.25,
    }
    assert describe(scores) == (
        "retrieval 12.7 (R@1: text 5.0, image 4.1)  composition 55.0 ± 2.2  scenes: retrieval 50.0, pointing 25.0"
    )
    assert describe({}) == ""
    assert describe({"chance": 0.5}) == "chance 50.0"
