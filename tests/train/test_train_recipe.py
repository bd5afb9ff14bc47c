"""Recipes: what a file says is what runs, and what it cannot mean is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from powerclip.alignment.config import AlignmentConfig
from powerclip.errors import UserError
from powerclip.objectives import OBJECTIVES
from powerclip.train.recipe import differences, dump, find_recipe, load_recipe, parse_recipe, shipped_recipes

MINIMAL = "model: {name: ViT-B-16}\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refused(*arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_shipped_recipe_loads_and_begins_with_a_command_that_names_a_recipe():
    assert {"quickstart/clip", "quickstart/powerclip"} <= set(shipped_recipes())
    for name, path in shipped_recipes().items():
        load_recipe(name)
        first = path.read_text(encoding="utf-8").splitlines()[0].split()
        assert first[:4] == ["#", "powerclip", "train", "--recipe"]
        find_recipe(first[4])


def test_the_two_quickstart_recipes_differ_in_their_objective_alone():
    changed = differences(load_recipe("quickstart/clip"), load_recipe("quickstart/powerclip"))
    assert {line.split(":")[0].split(".")[0] for line in changed} <= {"objective", "alignment"}


def test_a_shipped_recipe_is_found_by_its_repository_path_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("recipes/quickstart/clip.yaml") == find_recipe("quickstart/clip")


def test_a_recipe_overrides_what_it_extends_and_the_command_line_overrides_both(tmp_path):
    write(tmp_path / "base.yaml", MINIMAL + "optim: {lr: 1, warmup: 2}\ntrain: {steps: 3}\n")
    child = write(tmp_path / "sub" / "child.yaml", "extends: ../base.yaml\noptim: {lr: 5e-4}\n")
    recipe = load_recipe(child, ["train.steps=7", "optim.grad_clip=1"])
    assert (recipe.optim.lr, recipe.optim.warmup, recipe.train.steps) == (5e-4, 2, 7)
    assert recipe.optim.grad_clip == 1.0


def test_a_preset_starts_afresh_from_what_was_set_below_it(tmp_path):
    write(tmp_path / "base.yaml", MINIMAL + "alignment: {weight: 0.9, similarity: mean}\n")
    child = write(tmp_path / "child.yaml", "extends: base.yaml\nalignment: {preset: paper, gamma: 0.3}\n")
    alignment = load_recipe(child, ["alignment.tau=0.01"]).alignment
    assert (alignment.similarity, alignment.weight, alignment.loss) == ("sum", 0.1, "triplet")
    assert (alignment.gamma, alignment.tau) == (0.3, 0.01)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "1.e-3", "+1e-3", ".001e0"])
def test_a_number_may_be_written_in_any_usual_way(text):
    assert load_recipe("quickstart/clip", [f"optim.lr={text}"]).optim.lr == pytest.approx(1e-3)


def test_a_dump_reads_back_as_the_same_recipe():
    recipe = load_recipe("quickstart/powerclip", ["alignment.preset=paper", "train.device=cpu", "nodes=all"])
    assert parse_recipe(dump(recipe), "dump") == recipe


def test_recipes_that_compute_the_same_do_not_differ():
    recipe = load_recipe("quickstart/clip")
    assert differences(recipe, load_recipe("quickstart/clip", ["train.log_every=3", "train.device=cpu"])) == []
    assert differences(recipe, load_recipe("quickstart/clip", ["optim.lr=0.5"])) == ["optim.lr: 0.001 → 0.5"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.ler=1", ["command line", "'optim.ler'", "did you mean 'lr'"]),
        ("trian.steps=1", ["'trian'", "did you mean 'train'"]),
        ("nothing.like.it=1", ["'nothing'", "known:"]),
        ("train.steps=many", ["'train.steps'", "whole number", "'many'"]),
        ("train.steps=1.5", ["'train.steps'", "whole number"]),
        ("train.steps=true", ["'train.steps'", "whole number"]),
        ("optim.lr=fast", ["'optim.lr'", "number"]),
        ("optim.grad_clip=[1]", ["'optim.grad_clip'", "a number or null"]),
        ("alignment.empty_set=1", ["'alignment.empty_set'", "true or false"]),
        ("objective=powerclp", ["'objective'", "clip | powerclip", "did you mean 'powerclip'"]),
        ("optim=3", ["'optim'", "mapping"]),
        ("optim.lr=[1", ["optim.lr", "not valid YAML"]),
        ("optim.lr=2026-13-01", ["optim.lr", "not valid YAML", "month"]),
        ("optim.lr=" + 5000 * "[", ["optim.lr", "not valid YAML"]),
        ("alignment.weight=.nan", ["alignment.weight", "finite"]),
        ("alignment.scale=.inf", ["alignment.scale", "finite"]),
        ("optim.lr", ["'optim.lr' is not key=value"]),
        ("optim.lr=-1", ["optim.lr", "in [0, 1]"]),
        ("optim.lr=.nan", ["optim.lr", "in [0, 1]"]),
        ("train.batch_size=1", ["train.batch_size", "at least 2"]),
        ("optim.beta2=1", ["optim.beta2", "[0, 1)"]),
        ("alignment.alpha=2", ["alignment.alpha", "[0, 1]"]),
        ("alignment.preset=papr", ["preset", "paper"]),
        ("model.name=ViT-B-16", ["either model.name or model.config"]),
        ("model.config=null", ["either model.name or model.config"]),
    ],
)
def test_a_wrong_override_is_refused_with_its_key_and_what_is_expected(override, expected):
    message = refused("quickstart/clip", [override])
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL + "optim:\n  lr: 1\n  weigth_decay: 2\n", ["optim.weigth_decay", "did you mean 'weight_decay'"]),
        (MINIMAL + "train: {steps: 1\noptim: }\n", ["line 3", "not valid YAML"]),
        (MINIMAL + "objective: clip\nobjective: clip\n", ["line 3", "'objective' is given twice"]),
        ("- a\n- b\n", ["mapping"]),
        ("objective: clip\n", ["no model"]),
        ("", ["no model"]),
        ("extends: [a, b]\n", ["'extends'"]),
        ("extends: gone.yaml\n", ["extends gone.yaml", "no file"]),
        ("extends: recipe.yaml\n", ["circle"]),
        (MINIMAL + "extends: recipe.yml\n", ["no file"]),
        (MINIMAL + "train:\n", ["'train'", "mapping"]),
        (MINIMAL + "1: 2\n", ["unknown key '1'"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_place(tmp_path, text, expected):
    path = write(tmp_path / "recipe.yaml", text)
    message = refused(path)
    assert all(part in message for part in [str(path), *expected]), message


def test_more_sets_than_can_be_enumerated_are_refused_before_anything_runs():
    exact = ["alignment.aggregation=exact", "regions.count=17"]
    with pytest.raises(UserError, match="at most 16"):
        load_recipe("quickstart/powerclip", exact)
    assert load_recipe("quickstart/powerclip", [*exact, "alignment.r2t=false"]).regions.count == 17  # T2R needs no sets
    assert load_recipe("quickstart/clip", exact).objective == "clip"


def test_an_error_in_an_extended_file_names_that_file(tmp_path):
    base = write(tmp_path / "base.yaml", MINIMAL + "trian: {}\n")
    assert str(base) in refused(write(tmp_path / "child.yaml", "extends: base.yaml\n"))


def test_a_circle_of_two_recipes_is_refused(tmp_path):
    write(tmp_path / "a.yaml", "extends: b.yaml\n")
    write(tmp_path / "b.yaml", "extends: a.yaml\n")
    assert "circle" in refused(tmp_path / "a.yaml")


def test_a_recipe_that_is_not_there_is_refused_with_the_nearest_shipped_one(tmp_path):
    assert "did you mean 'quickstart/powerclip'" in refused("quickstart/powrclip.yaml")
    assert "folder" in refused(tmp_path)


def test_a_binary_file_is_no_recipe(tmp_path):
    path = tmp_path / "image.yaml"
    path.write_bytes(b"\x89PNG\r\n\xff\xfe")
    assert "not a text file" in refused(path)


def test_the_cc12m_recipes_are_the_papers_run_and_differ_in_their_method_alone():
    clip = load_recipe("cc12m/clip")
    optim, settings = clip.optim, clip.train
    assert clip.model.name == "ViT-B-16"
    assert (settings.epochs, settings.batch_size) == (32, 4096)
    assert (optim.lr, optim.weight_decay, optim.beta1, optim.beta2, optim.eps) == (1e-3, 0.2, 0.9, 0.98, 1e-6)
    assert (optim.schedule, optim.warmup, optim.grad_clip) == ("cosine", 10_000, None)
    assert (clip.data.samples, clip.data.crop) == (10_968_539, 0.9)
    methods = {name.split("/")[1]: load_recipe(name) for name in shipped_recipes() if name.startswith("cc12m/")}
    assert {"powerclip_r", "powerclip_s", *OBJECTIVES} - {"powerclip"} <= methods.keys()
    for name, recipe in methods.items():
        changed = {line.split(":")[0].split(".")[0] for line in differences(clip, recipe)}
        assert changed <= {"objective", "objective_settings", "regions", "alignment"}, name
    assert differences(methods["powerclip_r"], methods["powerclip_s"]) == ["regions.kind: random → segments"]
    assert load_recipe("powerclip_r_b16_cc12m") == methods["powerclip_r"]
    for variant in ("powerclip_r", "powerclip_s"):
        assert methods[f"{variant}_paper"].alignment == AlignmentConfig.named("paper")
        assert methods[variant].alignment == AlignmentConfig(largest_set=0)
    assert methods["filip_paper"].objective_settings["global_weight"] == 0


def test_the_fine_tuning_recipe_takes_any_model_and_weights():
    recipe = load_recipe("finetune", ["data.table=mine.csv", "model.pretrained=ViT-L-14/openai", "train.steps=10"])
    assert (recipe.model.pretrained, recipe.data.table, recipe.train.steps) == ("ViT-L-14/openai", "mine.csv", 10)
    assert recipe.objective == "powerclip"


def test_a_list_of_shards_needs_no_quotes_on_the_command_line():
    recipe = load_recipe("cc12m/clip", ["data.shards=@list.txt"])
    assert recipe.data.shards == "@list.txt"
