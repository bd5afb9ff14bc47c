"""Studies: what a file says is what runs, seeds are shared, finished runs are kept, failures do not stop the rest."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny_study import write_base

from powerclip.compare import pool
from powerclip.compare.run import RunOptions, compare_study, identity
from powerclip.compare.study import RunFailure, Setting, Study, StudyResults, read_study
from powerclip.compare.table import COMPARED, MEASURES, study_table, summary
from powerclip.encoders.models import check_config
from powerclip.errors import UserError
from powerclip.objectives import build_objective
from powerclip.report.curves_page import curves_page
from powerclip.train.recipe import load_recipe
from powerclip.train.results import Results

STUDY = """
about: A trial.
base: base.yaml
baseline: clip
settings:
  powerclip:
  clip: {about: the baseline, objective: clip}
  heavy: {alignment: {weight: 3.0}}
"""


@pytest.fixture
def folder(tmp_path: Path, mini_corpus: Path) -> Path:
    write_base(tmp_path, mini_corpus, steps=4, retrieval=True)
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path


def run(study: Study, output: Path, seeds: list[int], **options: bool) -> tuple[StudyResults, str]:
    printed = io.StringIO()
    results = compare_study(study, output, seeds, RunOptions(console=Console(file=printed, width=80), **options))
    return results, printed.getvalue()


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_setting_is_the_base_with_what_it_changes(folder):
    study = read_study([str(folder / "study.yaml")], ["train.steps=7"])
    assert [setting.name for setting in study.settings] == ["powerclip", "clip", "heavy"]
    assert (study.baseline, study.about) == ("clip", "A trial.")
    powerclip, clip, heavy = (setting.recipe for setting in study.settings)
    assert (powerclip.objective, clip.objective) == ("powerclip", "clip")
    assert heavy.alignment == replace(powerclip.alignment, weight=3.0)
    assert {recipe.train.steps for recipe in (powerclip, clip, heavy)} == {7}
    assert study.settings[1].about == "the baseline"


def test_a_seed_is_that_of_weights_regions_and_data(folder):
    recipe = read_study([str(folder / "study.yaml")]).settings[0].at(5)
    assert (recipe.train.seed, recipe.data.seed) == (5, 5)


def test_recipes_make_a_study_by_their_names_and_the_first_is_the_baseline():
    study = read_study(["quickstart/clip", "quickstart/powerclip"], ["train.steps=3"])
    assert [setting.name for setting in study.settings] == ["clip", "powerclip"]
    assert study.baseline == "clip"
    assert study.settings[1].recipe == load_recipe("quickstart/powerclip", ["train.steps=3"])


def test_a_part_of_a_study_keeps_its_baseline(folder):
    study = read_study([str(folder / "study.yaml")])
    assert [setting.name for setting in study.only(["heavy"]).settings] == ["clip", "heavy"]
    with pytest.raises(UserError, match="did you mean 'heavy'"):
        study.only(["hevy"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base: base.yaml\n", "no 'settings'"),
        ("- a\n", "no 'settings'"),
        ("settings: {a: {}}\n", "'base' must name the recipe"),
        ("base: gone\nsettings: {a: {}}\n", "no recipe file gone"),
        ("base: base.yaml\nsettings: {}\n", "'settings' must map"),
        ("base: base.yaml\nsettings: {a: 3}\n", "setting 'a' must be a mapping"),
        ("base: base.yaml\nsettings: {a: {optim: {ler: 1}}}\n", "setting 'a': unknown key 'optim.ler'"),
        ("base: base.yaml\nsettings: {a: {optim: {lr: -1}}}\n", "setting 'a': optim.lr must be at least 0"),
        ("base: base.yaml\nsettings: {../a: {}}\n", "cannot name a setting"),
        ("base: base.yaml\nbaselin: a\nsettings: {a: {}}\n", "did you mean 'baseline'"),
        ("base: base.yaml\nbaseline: b\nsettings: {a: {}}\n", "the baseline 'b' is not one of the settings"),
    ],
)
def test_a_wrong_study_is_refused_with_its_name(folder, text, expected):
    path = folder / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_study([str(path)])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_studies_that_cannot_be_are_refused():
    for files, expected in (
        ([], "name a study"),
        (["gone.yaml"], "no study file"),
        (["quickstart/clip"] * 2, "called clip"),
    ):
        with pytest.raises(UserError, match=expected):
            read_study(files)


STUDIES = Path(__file__).parents[2] / "studies"


@pytest.mark.parametrize("path", sorted(STUDIES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_study_of_the_repository_can_be_read_and_its_objectives_built(path):
    assert path.read_text().startswith(f"# powerclip compare {path.relative_to(STUDIES.parent)}")
    for setting in read_study([str(path)]).settings:
        recipe = setting.recipe
        build_objective(recipe.objective, recipe.alignment, recipe.objective_settings)
        if recipe.model.config is not None:
            check_config(recipe.model.config, setting.name)


@pytest.mark.parametrize("path", sorted((STUDIES / "learning").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_two_settings_of_a_learning_study_are_the_same_and_each_is_described(path):
    settings = read_study([str(path)]).settings
    assert all(setting.about for setting in settings)
    recipes = [setting.recipe for setting in settings]
    assert all(one != other for place, one in enumerate(recipes) for other in recipes[:place])


def test_learning_studies_share_their_runs_and_a_name_means_the_same_in_all():
    by_name: dict[str, set[str]] = {}
    for path in sorted((STUDIES / "learning").glob("*.yaml")):
        for setting in read_study([str(path)]).settings:
            by_name.setdefault(setting.name, set()).add(identity(setting.recipe))
    assert [name for name, found in by_name.items() if len(found) > 1] == []
    distinct = len(set().union(*by_name.values()))
    print(f"{distinct} settings, {3 * distinct} runs with 3 seeds")
    assert distinct <= 80  # an hour or two of one GPU, not a day


# ---- the runs --------------------------------------------------------------------------------------------------------


def test_a_study_writes_its_table_and_goes_on_where_it_stopped(folder, monkeypatch):
    study, output = read_study([str(folder / "study.yaml")]), folder / "out"
    results, printed = run(study, output, [0, 1])
    assert all(isinstance(results[name][seed], Results) for name in ("clip", "powerclip", "heavy") for seed in (0, 1))
    assert "[6/6] heavy, seed 1: retrieval" in printed
    assert printed.count("12 images") == 1  # the corpus was read once
    table = (output / "table.md").read_text()
    assert table.startswith("A trial.\n\n| setting | retrieval | Δ | R@1 | Δ | R@1 text |")
    assert "| heavy |" in table
    assert "- clip: the baseline" in table
    assert "2 seeds (0, 1)" in table
    written = json.loads((output / "results.json").read_text())
    assert written["baseline"] == "clip"
    assert written["settings"]["heavy"]["runs"]["1"]["scores"] == results["heavy"][1].scores
    assert written["settings"]["heavy"]["summary"]["composition/acc"]["seeds"] == 2
    page = (output / "curves.html").read_text()
    assert all(f"■ {name}" in page for name in results)
    assert page.count("<svg") == 5  # losses, violation, empty sets, scale
    assert not (output / "clip" / "seed-0" / "model").exists()

    trained = []
    original = pool.train
    monkeypatch.setattr(pool, "train", lambda *args, **kwargs: trained.append(args) or original(*args, **kwargs))
    again, printed = run(study, output, [0, 1])
    assert again == results
    assert trained == []
    assert printed.count("finished before") == 6
    run(read_study([str(folder / "study.yaml")], ["alignment.weight=2"]).only(["heavy"]), output, [1])
    assert [args[1].parts[-2:] for args in trained] == [("clip", "seed-1"), ("heavy", "seed-1")]


def test_results_of_another_version_do_not_count_and_a_line_says_so(folder, monkeypatch):
    study, output = read_study([str(folder / "study.yaml")]).only(["clip"]), folder / "out"
    run(study, output, [0, 1])
    path = output / "clip" / "seed-1" / "results.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "format"}))
    _, printed = run(study, output, [0, 1])
    assert printed.count("finished by another version, with other metrics: it is trained again") == 1
    assert printed.count("finished before") == 1
    assert json.loads(path.read_text())["format"] == 2


def test_all_settings_of_a_seed_start_from_the_same_weights_and_see_the_same_pairs(folder):
    # A weight of zero is CLIP: the same data, weights and order give the same first loss, to the bit.
    (folder / "study.yaml").write_text(
        "base: base.yaml\nsettings: {clip: {objective: clip}, zero: {alignment: {weight: 0.0}}}"
    )
    results, _ = run(read_study([str(folder / "study.yaml")]), folder / "out", [0, 1])
    for seed in (0, 1):
        one, other = (
            json.loads((folder / "out" / name / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()[0])
            for name in ("clip", "zero")
        )
        assert one["clip"] == other["clip"]
    assert results["clip"][0].scores != results["clip"][1].scores


def test_a_change_of_the_evaluation_alone_runs_again(folder):
    study, output = read_study([str(folder / "study.yaml")]).only(["clip"]), folder / "out"
    run(study, output, [0])
    without = read_study([str(folder / "study.yaml")], ["evaluation.composition=null"]).only(["clip"])
    results, printed = run(without, output, [0])
    assert "finished before" not in printed
    assert "composition/acc" not in results["clip"][0].scores


def test_the_losses_that_a_method_adds_have_their_curves():
    rows = [{"step": step, "clip": 4, "local": 3, "simclr": 2, "byol": 1, "unknown": 0} for step in (1, 2)]
    page = curves_page({"made up": [rows]})
    assert re.findall(r'aria-label="([^"]+)"', page) == ["CLIP loss", "Local loss", "SimCLR loss", "BYOL loss"]


def test_models_are_kept_when_asked_for(folder):
    study = read_study([str(folder / "study.yaml")]).only(["clip"])
    run(study, folder / "out", [0], keep_models=True)
    assert (folder / "out" / "clip" / "seed-0" / "model").is_dir()


def test_a_run_that_fails_is_noted_and_the_rest_goes_on(folder):
    (folder / "study.yaml").write_text(
        "base: base.yaml\nsettings:\n  clip: {objective: clip}\n"
        "  wild: {optim: {lr: 1e30}, train: {max_skipped: 0}}\n  powerclip: {}"
    )
    results, printed = run(read_study([str(folder / "study.yaml")]), folder / "out", [0])
    assert "training diverged" in results["wild"][0].reason
    assert isinstance(results["powerclip"][0], Results)
    assert "wild, seed 0: failed: training diverged" in printed
    table = (folder / "out" / "table.md").read_text()
    assert "- wild, seed 0, failed: training diverged" in table
    assert "| wild | – |" in table


def test_a_backend_that_cannot_run_here_fails_its_setting_alone_and_leaves_no_run(folder, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (folder / "study.yaml").write_text(STUDY + "  fused: {alignment: {backend: triton}}\n")
    results, printed = run(read_study([str(folder / "study.yaml")]).only(["fused"]), folder / "out", [0])
    assert isinstance(results["clip"][0], Results)
    assert "fused, seed 0: failed: alignment.backend: triton" in printed
    assert not (folder / "out" / "fused").exists()


def test_when_every_run_fails_the_study_fails(folder):
    study = read_study([str(folder / "study.yaml")], ["data.shards=nowhere/*.tar"])
    with pytest.raises(UserError, match=r"every run failed; the first: data\.shards: nothing matches"):
        run(study, folder / "out", [0])


def test_nothing_but_the_table_is_printed_when_quiet(folder):
    _, printed = run(read_study([str(folder / "study.yaml")]), folder / "out", [0], quiet=True)
    assert len(printed.splitlines()) == 4  # the header and three settings, however narrow the terminal


# ---- the table -------------------------------------------------------------------------------------------------------


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
