"""The end of a study: held-out scores are those of `powerclip evaluate`, measured once, of the models as they are."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from tiny_study import write_base
from typer.testing import CliRunner

from powerclip import cli
from powerclip.compare import held_out as study_held_out
from powerclip.compare import pool
from powerclip.compare.held_out import read_held_out
from powerclip.compare.run import RunOptions, compare_study
from powerclip.compare.study import read_study
from powerclip.errors import UserError
from powerclip.evaluate.images import TarImages
from powerclip.evaluate.runner import evaluate_model

STUDY = """
base: base.yaml
settings:
  clip: {about: the baseline, objective: clip}
  heavy: {alignment: {weight: 3.0}}
"""
WILD = "  wild: {optim: {weight_decay: 1e36}, train: {max_skipped: 0}}\n"


@pytest.fixture
def folder(tmp_path: Path, mini_corpus: Path) -> Path:
    """A study, and held-out data in `test.tar` and `sugarcrepe/` beside it."""
    write_base(tmp_path, mini_corpus)
    (tmp_path / "study.yaml").write_text(STUDY)
    shutil.copy(mini_corpus / "val-000.tar", tmp_path / "test.tar")
    shutil.copytree(mini_corpus / "sugarcrepe", tmp_path / "sugarcrepe")
    return tmp_path


def run(folder: Path, *, seeds: tuple[int, ...] = (0, 1), test: bool = True, **options: bool) -> str:
    """What `powerclip compare` prints."""
    printed = io.StringIO()
    paths = [folder / "test.tar", folder / "sugarcrepe"] if test else []
    study = read_study([str(folder / "study.yaml")])
    compare_study(study, folder / "out", seeds, RunOptions(console=Console(file=printed, width=80), **options), paths)
    return printed.getvalue()


def written(folder: Path) -> dict:
    return json.loads((folder / "out" / "test.json").read_text())


def calls(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[tuple]:
    """The arguments of each call from now on."""
    seen: list[tuple] = []
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: seen.append(args) or original(*args, **kwargs))
    return seen


def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The models that are loaded for a measurement from now on."""
    return calls(monkeypatch, study_held_out, "Embedder")


def test_unfinished_runs_are_trained_and_all_scores_are_those_of_evaluate(folder):
    printed = run(folder)
    assert (
        "Held-out data: test (6 images, 9 captions), sugarcrepe (3 comparisons, 1 left out: their images are not there)"
        in printed
    )
    assert "[4/4] heavy, seed 1: test: mean recall" in printed
    found = written(folder)
    for name in ("clip", "heavy"):
        for seed in (0, 1):
            model = folder / "out" / name / f"seed-{seed}" / "model"
            expected = evaluate_model(
                str(model), [folder / "test.tar", folder / "sugarcrepe"], output=folder / "evaluated", quiet=True
            ).results
            scores = found["settings"][name]["runs"][str(seed)]["scores"]
            recall = expected["test"][0]["metrics"]
            assert {metric: scores[f"test/{metric}"] for metric in recall} == recall
            whole, *kinds = expected["sugarcrepe"]
            assert {metric: scores[f"sugarcrepe/{metric}"] for metric in whole["metrics"]} == whole["metrics"]
            for kind in kinds:
                assert scores[f"{kind['dataset']}/acc"] == kind["metrics"]["acc"]
            own = json.loads((model.parent / "results.json").read_text())["scores"]
            assert scores["sugarcrepe/acc"] == own["composition/acc"]


def test_the_table_has_a_row_for_each_measure_and_a_gain_for_each_setting(folder):
    run(folder)
    table = (folder / "out" / "test.md").read_text()
    lines = table.splitlines()
    assert lines[0] == "| held-out | clip | heavy | Δ |"
    rows = [line.split(" |")[0].removeprefix("| ") for line in lines if line.startswith(("| test", "| sugar"))]
    ways = [f"test: R@{k} {way}" for way in ("text", "image") for k in (1, 5, 10)]
    kinds = [f"sugarcrepe: {what}" for what in ("accuracy", "mean of kinds", "replace_att", "swap_obj")]
    assert rows == ["test: mean recall", "test: R@1", *ways, *kinds]
    runs = written(folder)["settings"]["heavy"]["runs"]
    sides = [runs[seed]["scores"][f"test/{way}_retrieval_recall@1"] for seed in "01" for way in ("text", "image")]
    both = written(folder)["settings"]["heavy"]["summary"]["test/mean_recall@1"]
    assert both["mean"] == pytest.approx(100 * sum(sides) / 4)
    assert "2 seeds (0, 1)" in table
    summary = written(folder)["settings"]["heavy"]["summary"]["test/mean_recall"]
    values = {
        name: [100 * written(folder)["settings"][name]["runs"][seed]["scores"]["test/mean_recall"] for seed in "01"]
        for name in ("clip", "heavy")
    }
    gains = [ours - theirs for ours, theirs in zip(values["heavy"], values["clip"], strict=True)]
    assert summary["mean"] == pytest.approx(sum(values["heavy"]) / 2)
    assert summary["difference"] == pytest.approx(sum(gains) / 2)
    assert summary["standard_error"] == pytest.approx(abs(gains[0] - gains[1]) / 2)  # √(2·(d/2)²)/√2 of two seeds
    assert summary["ratio"] == pytest.approx(sum(values["heavy"]) / sum(values["clip"]))
    assert 0 <= summary["p"] <= 1


def test_a_finished_study_is_neither_trained_nor_measured_twice(folder, monkeypatch):
    run(folder, test=False, keep_models=True)
    trained, loaded = calls(monkeypatch, pool, "train"), measured(monkeypatch)
    run(folder)
    assert trained == []
    assert len(loaded) == 4
    first = (folder / "out" / "test.md").read_bytes()
    printed = run(folder)
    assert trained == []
    assert len(loaded) == 4
    assert printed.count("(measured before)") == 4
    assert (folder / "out" / "test.md").read_bytes() == first


def test_images_are_decoded_once_for_all_models(folder, monkeypatch):
    run(folder, test=False, keep_models=True)
    decoded = calls(monkeypatch, TarImages, "decode")
    run(folder)
    assert len(decoded) == 6


def test_a_run_that_was_trained_again_is_measured_again(folder, monkeypatch):
    run(folder)
    shutil.rmtree(folder / "out" / "heavy" / "seed-1" / "model")
    loaded = measured(monkeypatch)
    printed = run(folder, keep_models=True)
    assert len(loaded) == 1
    assert printed.count("(finished before)") == 3
    assert printed.count("(measured before)") == 3


def test_data_that_changed_are_measured_again_and_other_scores_stay(folder):
    run(folder, seeds=(0,))
    file = folder / "sugarcrepe" / "replace_att.json"
    file.write_text(file.read_text().replace("a blue square", "a black square"))
    run(folder, seeds=(0,))
    kept = json.loads((folder / "out" / "clip" / "seed-0" / "test.json").read_text())["data"]
    assert sorted(one["name"] for one in kept.values()) == ["sugarcrepe", "sugarcrepe", "test"]


def test_data_are_known_by_their_content_wherever_they_lie(folder):
    shutil.copytree(folder / "sugarcrepe", folder / "elsewhere" / "sugarcrepe")
    one, other = read_held_out([folder / "sugarcrepe"]), read_held_out([folder / "elsewhere" / "sugarcrepe"])
    assert one[0].digest == other[0].digest


def test_a_model_that_was_not_kept_is_an_error_that_names_the_option_and_the_option_helps(folder, monkeypatch):
    run(folder, test=False)
    trained = calls(monkeypatch, pool, "train")
    with pytest.raises(UserError, match=r"4 of 4 were not kept .*clip/seed-0.* with --keep-models trains these again"):
        run(folder)
    assert trained == []
    assert not (folder / "out" / "test.md").exists()
    run(folder, keep_models=True)
    assert len(trained) == 4
    assert (folder / "out" / "test.md").exists()


def test_runs_that_failed_are_noted_and_left_out(folder):
    with (folder / "study.yaml").open("a") as file:
        file.write(WILD)
    printed = run(folder, seeds=(0,))
    assert "wild, seed 0: left out, its run failed" in printed
    table = (folder / "out" / "test.md").read_text()
    assert "- wild, seed 0, failed: training diverged" in table
    assert "| – |" in table
    assert "training diverged" in written(folder)["settings"]["wild"]["runs"]["0"]["error"]
    assert "test/mean_recall" in written(folder)["settings"]["heavy"]["runs"]["0"]["scores"]


def test_a_model_that_cannot_be_read_is_noted_and_the_rest_is_measured(folder):
    run(folder, test=False, keep_models=True)
    (folder / "out" / "heavy" / "seed-1" / "model" / "open_clip_config.json").write_text("{")
    printed = run(folder)
    assert "heavy, seed 1: failed: " in printed
    assert written(folder)["settings"]["heavy"]["summary"]["test/mean_recall"]["seeds"] == 1


def test_only_the_tables_are_printed_when_quiet(folder):
    lines = run(folder, seeds=(0,), quiet=True).splitlines()
    assert len(lines) == 6  # a header and two settings, twice
    assert lines[3].split("  ")[0] == "setting"
    assert "test: mean recall" in lines[3]


def test_a_path_that_is_not_there_is_refused_before_anything_is_trained(folder, monkeypatch):
    trained = calls(monkeypatch, pool, "train")
    (folder / "test.tar").unlink()
    with pytest.raises(UserError, match=r"--test: there is no file or folder .*test\.tar"):
        run(folder)
    assert trained == []


def test_the_help_shows_the_option_with_an_example():
    shown = CliRunner().invoke(cli.app, ["compare", "--help"], env={"COLUMNS": "200"}).stdout
    text, _, examples = shown.partition("Examples:")
    assert "--test" in text
    assert "--keep-models" in text
    assert "powerclip compare studies/captions10k.yaml --seeds 5 --test " in examples


def test_the_command_passes_the_paths_on(folder):
    arguments = ["compare", folder / "study.yaml", "--seeds", 1, "--output", folder / "out", "--quiet"]
    done = CliRunner().invoke(
        cli.app, [*map(str, arguments), "--test", str(folder / "test.tar"), "--test", str(folder / "sugarcrepe")]
    )
    assert done.exit_code == 0, done.output
    assert set(written(folder)["data"]) == {"test", "sugarcrepe"}
