"""Studies: what a file says is what runs, and what it cannot mean is refused with its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from powerclip.compare.run import identity
from powerclip.compare.study import read_study
from powerclip.encoders.models import check_config
from powerclip.errors import UserError
from powerclip.objectives import build_objective
from powerclip.train.recipe import load_recipe


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
    study = read_study(["quickstart/clip", "quickstart/powerclip"], ["train.steps=30"])
    assert [setting.name for setting in study.settings] == ["clip", "powerclip"]
    assert study.baseline == "clip"
    assert study.settings[1].recipe == load_recipe("quickstart/powerclip", ["train.steps=30"])


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
        ("base: base.yaml\nsettings: {a: {optim: {lr: -1}}}\n", "setting 'a': optim.lr must lie in [0, 1]"),
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
