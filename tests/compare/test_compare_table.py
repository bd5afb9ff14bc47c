"""The table of a study: means, standard deviations, differences, marks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from powerclip.compare.study import RunFailure, Setting, Study, StudyResults
from powerclip.compare.table import COMPARED, MEASURES, study_table, summary
from powerclip.train.recipe import load_recipe
from powerclip.train.results import Results


def made(**scores: list[float]) -> tuple[Study, StudyResults]:
    """A study whose settings scored these retrieval means, a value for each seed, at 10, 11, 12, … ms a step."""
    recipe = load_recipe("quickstart/clip")
    study = Study(tuple(Setting(name, recipe) for name in scores), next(iter(scores)))
    results = {
        name: {
            seed: Results(1, 1.0, 0.010 + 0.001 * place, {"retrieval/mean_recall": value}, {})
            for seed, value in enumerate(values)
        }
        for place, (name, values) in enumerate(scores.items())
    }
    return study, results


def markdown(study: Study, results: StudyResults) -> str:
    return study_table(study, results).markdown()


def cells(table: str, name: str) -> list[str]:
    row = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_means_spreads_differences_and_marks_are_right():
    table = markdown(*made(clip=[0.10, 0.12, 0.14], ours=[0.13, 0.14, 0.18], other=[0.12, 0.13, 0.14]))
    assert cells(table, "clip") == ["12.0 ± 2.0", "", "10 ms"]
    # Differences 3, 2, 4: mean 3, standard deviation 1, t = 5.196 with 2 degrees of freedom.
    assert cells(table, "ours") == ["**15.0 ± 2.6**", "+3.0 (×1.25, p = 0.035)", "11 ms (×1.10)"]
    assert cells(table, "other") == ["<u>13.0 ± 1.0</u>", "+1.0 (×1.08, p = 0.23)", "12 ms (×1.20)"]


def test_a_measure_over_two_scores_is_their_mean_and_needs_both():
    both = next(measure for measure in MEASURES if measure.label == "R@1")
    scores = {"retrieval/text_retrieval_recall@1": 0.2, "retrieval/image_retrieval_recall@1": 0.1}
    assert both.value(Results(1, 1.0, None, scores)) == pytest.approx(15)
    assert both.value(Results(1, 1.0, None, {"retrieval/text_retrieval_recall@1": 0.2})) is None


def test_one_seed_has_neither_spread_nor_test():
    assert cells(markdown(*made(clip=[0.10], ours=[0.08])), "ours") == ["8.0", "−2.0 (×0.80)", "11 ms (×1.10)"]


def test_settings_that_print_alike_share_their_mark():
    table = markdown(*made(a=[0.1], b=[0.10004], c=[0.05]))
    assert [cells(table, name)[0] for name in "abc"] == ["**10.0**", "**10.0**", "<u>5.0</u>"]
    assert "**" not in markdown(*made(a=[0.1], b=[0.1]))


def test_a_difference_is_taken_over_the_seeds_that_both_have():
    study, results = made(clip=[0.1, 0.2, 0.3], ours=[0.2, 0.3, 0.9])
    results["clip"][2] = RunFailure("training diverged")
    found = summary(study, results, "ours", MEASURES)["retrieval/mean_recall"]
    assert found["difference"] == pytest.approx(10)
    assert found["seeds"] == 3
    assert found["mean"] == pytest.approx(100 * (0.2 + 0.3 + 0.9) / 3)


def test_the_terminals_lines_are_aligned():
    printed = io.StringIO()
    study_table(*made(clip=[0.1, 0.2], longer_name=[0.15, 0.21]), COMPARED).print(Console(file=printed, width=20))
    lines = printed.getvalue().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["setting", "retrieval", "Δ", "time"]
