"""Several studies: in one command, each in its folder; what one has trained is copied by the others."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny_study import write_base
from typer.testing import CliRunner, Result

from powerclip import cli
from powerclip.compare import pool
from powerclip.compare import run as study_run
from powerclip.compare.run import FinishedRuns, RunOptions, compare_study, copy_run, identity, run_study
from powerclip.compare.study import read_study
from powerclip.errors import UserError
from powerclip.train import run_folder
from powerclip.train.recipe import load_recipe
from powerclip.train.run_folder import RunFolder

ONE = "base: base.yaml\nsettings: {clip: {objective: clip}, heavy: {alignment: {weight: 3.0}}}\n"
# The same settings as in ONE, one under another name, and one of its own.
TWO = (
    "base: base.yaml\nsettings:\n  baseline: {objective: clip}\n  heavy: {alignment: {weight: 3.0}}\n"
    "  light: {alignment: {weight: 0.1}}\n"
)
WRONG = "base: base.yaml\nsettings: {clip: {objective: clip, train: {max_skipped: 0}, optim: {weight_decay: 1e36}}}\n"


@pytest.fixture
def folder(tmp_path: Path, mini_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two studies, and the folder as the working directory."""
    write_base(tmp_path, mini_corpus)
    (tmp_path / "one.yaml").write_text(ONE)
    (tmp_path / "two.yaml").write_text(TWO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`STUDY/SETTING/seed-n` of each run that is trained from now on."""
    seen: list[str] = []
    original = pool.train

    def train(recipe, output, **options):
        seen.append("/".join(output.parts[-3:]))
        return original(recipe, output, **options)

    monkeypatch.setattr(pool, "train", train)
    return seen


def compare(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)], env={"COLUMNS": "200"})


def run(name: str, *overrides: str, output: str = "", **options: bool) -> str:
    """What the study in `NAME.yaml` prints, with one seed."""
    printed = io.StringIO()
    study, folder = read_study([f"{name}.yaml"], overrides), Path("runs", output or name)
    compare_study(study, folder, [0], RunOptions(console=Console(file=printed, width=80), **options))
    return printed.getvalue()


# ---- one command -----------------------------------------------------------------------------------------------------


def test_each_study_has_its_folder_and_shared_runs_and_corpora_are_made_once(folder, trained):
    done = compare("one.yaml", "two.yaml", "train.steps=3", "--seeds", 2)
    assert done.exit_code == 0, done.output
    assert [name for name in trained if name.startswith("one/")] == [
        "one/clip/seed-0", "one/heavy/seed-0", "one/clip/seed-1", "one/heavy/seed-1"
    ]  # fmt: skip
    assert [name for name in trained if name.startswith("two/")] == ["two/light/seed-0", "two/light/seed-1"]
    assert done.output.count("(taken from one)") == 4
    assert done.output.count("12 images") == 1
    assert done.output.index("Study 1/2: one") < done.output.index("Study 2/2: two")
    found = {name: json.loads((folder / "runs" / name / "results.json").read_text()) for name in ("one", "two")}
    assert found["one"]["settings"]["heavy"]["runs"] == found["two"]["settings"]["heavy"]["runs"]
    assert found["one"]["settings"]["clip"]["runs"] == found["two"]["settings"]["baseline"]["runs"]
    assert found["two"]["settings"]["light"]["runs"]["0"]["steps"] == 3  # overrides are for all

    trained.clear()
    again = compare("one.yaml", "two.yaml", "train.steps=3", "--seeds", 2)
    assert trained == []
    assert again.output.count("(finished before)") == 10


def test_the_output_folder_holds_the_studies(folder):
    done = compare("one.yaml", "two.yaml", "--seeds", 1, "--output", folder / "here", "--quiet")
    assert done.exit_code == 0, done.output
    assert {path.name for path in (folder / "here").iterdir()} == {"one", "two"}
    # A name and a table for each study, and nothing else.
    assert [line.split("  ")[0] for line in done.output.splitlines()] == [
        "Study 1/2: one", "setting", "clip", "heavy", "Study 2/2: two", "setting", "baseline", "heavy", "light"
    ]  # fmt: skip


def test_a_study_that_fails_is_reported_and_the_others_go_on(folder):
    (folder / "wild.yaml").write_text(WRONG)
    (folder / "unreadable.yaml").write_text("base: base.yaml\nsettings: {a: {optim: {ler: 1}}}\n")
    done = compare("unreadable.yaml", "wild.yaml", "one.yaml", "--seeds", 1)
    assert isinstance(done.exception, UserError)  # which the command line makes one line and exit code 2
    assert str(done.exception).startswith("2 of 3 studies failed: unreadable: ")
    assert "wild: every run failed; the first: training diverged" in str(done.exception)
    assert done.output.index("unreadable: failed: ") < done.output.index(
        "Study 2/3: wild"
    )  # before anything is trained
    assert (folder / "runs" / "one" / "table.md").is_file()


def test_only_picks_a_setting_where_there_is_one(folder, trained):
    done = compare("one.yaml", "two.yaml", "--seeds", 1, "--only", "light")
    assert done.exit_code == 0, done.output
    assert trained == ["two/baseline/seed-0", "two/light/seed-0"]
    assert not (folder / "runs" / "one").exists()
    with pytest.raises(UserError, match=r"no setting 'lihgt' in any of the studies \(did you mean 'light'\?\)"):
        raise compare("one.yaml", "two.yaml", "--only", "lihgt").exception


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["one.yaml", "base.yaml"], "one.yaml is a study and base.yaml a recipe: compare either studies or recipes"),
        (["quickstart/clip", "two.yaml"], "two.yaml is a study and quickstart/clip a recipe"),
        (["one.yaml", "gone.yaml"], "no study file gone.yaml"),
        (["one.yaml", "deeper/one.yaml"], "two studies are called one"),
        (["one.yaml", "binary.yaml"], "binary.yaml: not a text file"),
    ],
)
def test_files_that_do_not_go_together_are_refused_before_anything_is_written(folder, files, expected):
    (folder / "deeper").mkdir()
    (folder / "deeper" / "one.yaml").write_text(ONE)
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    error = compare(*files).exception
    assert isinstance(error, UserError)
    assert expected in str(error)
    assert not (folder / "runs").exists()


def test_the_help_shows_several_studies():
    _, _, examples = compare("--help").output.partition("Examples:")
    assert "powerclip compare studies/learning/*.yaml --seeds 3" in examples


# ---- shared runs -----------------------------------------------------------------------------------------------------


def test_a_run_is_taken_over_whole_from_a_study_of_another_command(folder, trained):
    run("one")
    trained.clear()
    printed = run("two")
    assert "baseline, seed 0: composition" in printed
    assert printed.count("(taken from one)") == 2
    assert trained == ["two/light/seed-0"]
    source, copy = folder / "runs/one/heavy/seed-0", folder / "runs/two/heavy/seed-0"
    assert {path.name for path in copy.iterdir()} == {path.name for path in source.iterdir()}
    for name in ("recipe.yaml", "metrics.jsonl", "environment.json", "results.json"):
        assert (copy / name).read_bytes() == (source / name).read_bytes()
    assert run("two").count("(finished before)") == 3


def test_runs_are_shared_wherever_a_study_puts_them(folder, trained):
    by_seed = replace(read_study(["one.yaml"]), layout="seed-{seed}/{setting}")
    run_study(by_seed, Path("runs/one"), [0], RunOptions(quiet=True))
    assert trained == ["one/seed-0/clip", "one/seed-0/heavy"]
    assert run("two").count("(taken from one)") == 2


def test_another_recipe_or_evaluation_or_an_unfinished_run_is_not_taken(folder, trained):
    run("one")
    (folder / "runs/one/clip/seed-0/results.json").unlink()
    trained.clear()
    run("two", "train.steps=3")
    run("two", "evaluation.composition=null", output="blind")
    run("two", output="again")
    names = ("baseline", "heavy", "light")
    assert trained == [
        *(f"{study}/{name}/seed-0" for study in ("two", "blind") for name in names),
        "again/baseline/seed-0",  # heavy is finished in one, the rest has other recipes
        "again/light/seed-0",
    ]


def test_a_model_that_is_to_be_kept_comes_along_and_a_run_without_one_is_no_use(folder, trained):
    run("one")
    run("two", keep_models=True)
    assert len(trained) == 5
    printed = run("one", keep_models=True)
    assert len(trained) == 5
    assert printed.count("(taken from two)") == 2
    assert (folder / "runs/one/clip/seed-0/model/open_clip_config.json").is_file()
    assert run("two", output="bare").count("(taken from one)") == 2
    assert not (folder / "runs/bare/heavy/seed-0/model").exists()  # a model that nobody asked for stays where it is


def test_held_out_data_are_measured_on_models_that_a_study_beside_has_kept(folder, mini_corpus, trained):
    run("two", keep_models=True)
    run("one")
    trained.clear()
    options = RunOptions(console=Console(file=io.StringIO()))
    compare_study(read_study(["one.yaml"]), Path("runs/one"), [0], options, [mini_corpus / "sugarcrepe"])
    assert trained == []
    assert (folder / "runs/one/test.md").is_file()


def test_finished_runs_are_read_once_and_only_where_a_study_is(folder, monkeypatch):
    run("one")
    (folder / "runs/other/clip/seed-0").mkdir(parents=True)  # no table.md: not a study
    (folder / "runs/other/clip/seed-0/results.json").write_text("{}")
    parsed: list[str] = []
    original = run_folder.parse_recipe
    monkeypatch.setattr(run_folder, "parse_recipe", lambda text, where: parsed.append(where) or original(text, where))
    shared, unknown = FinishedRuns(), load_recipe("base.yaml", ["alignment.weight=7"])
    for _ in range(3):
        assert shared.find(unknown, Path("runs/new")) is None
    assert len(parsed) == 2


def test_a_run_that_was_replaced_since_is_not_found(folder):
    run("one")
    shared = FinishedRuns()
    recipe = read_study(["one.yaml"]).settings[1].at(0)
    assert shared.find(recipe, Path("runs/new")) == RunFolder(folder / "runs/one/heavy/seed-0")
    run("one", "train.steps=3")
    assert shared.find(recipe, Path("runs/new")) is None


def test_what_only_steers_a_run_is_no_part_of_its_identity(folder):
    recipe = load_recipe("base.yaml")
    assert identity(load_recipe("base.yaml", ["data.workers=2", "train.save_model=false"])) == identity(recipe)
    for change in ("optim.lr=0.1", "train.seed=1", "evaluation.composition=null"):
        assert identity(load_recipe("base.yaml", [change])) != identity(recipe)


def test_nothing_but_a_run_is_replaced(folder):
    run("one")
    notes = folder / "runs/two/heavy/seed-0/notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    source = RunFolder(folder / "runs/one/heavy/seed-0")
    with pytest.raises(UserError, match="not empty and not a run"):
        copy_run(source, RunFolder(notes.parent), load_recipe("base.yaml"), model=False)
    assert list(notes.parent.iterdir()) == [notes]


def test_runs_of_epochs_are_kept_and_shared_although_their_steps_follow_from_the_data(folder, trained):
    (folder / "base.yaml").write_text((folder / "base.yaml").read_text().replace("steps: 2", "epochs: 1"))
    run("one")
    assert trained == ["one/clip/seed-0", "one/heavy/seed-0"]
    trained.clear()
    assert run("one").count("(finished before)") == 2
    assert run("two").count("(taken from one)") == 2
    assert trained == ["two/light/seed-0"]


def test_a_finished_run_whose_recipe_is_no_text_any_more_is_trained_again(folder, trained):
    run("one")
    trained.clear()
    (folder / "runs" / "one" / "clip" / "seed-0" / "recipe.yaml").write_bytes(b"\xff\x80")
    run("two")
    assert trained == ["two/baseline/seed-0", "two/light/seed-0"]
    assert "clip, seed 0: " in run("one")


def test_a_run_that_cannot_be_copied_is_a_failure_of_its_own(folder, monkeypatch):
    run("one")

    def full(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")])

    monkeypatch.setattr(study_run.shutil, "copytree", full)
    printed = run("two")
    assert printed.count("could not be copied: [Errno 28] No space left on device") >= 2
    assert "light, seed 0: composition" in printed
