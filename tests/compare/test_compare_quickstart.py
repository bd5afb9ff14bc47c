"""The quickstart: a study of two recipes, resumed where it was interrupted, with a table and a report."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from powerclip.compare import pool, quickstart
from powerclip.compare.quickstart import lines, quickstart_table, run_quickstart
from powerclip.compare.study import StudyResults
from powerclip.errors import UserError
from powerclip.evaluate.metrics import CUTOFFS, KINDS
from powerclip.train.results import Results

BASE = """
model:
  config:
    embed_dim: 16
    vision_cfg: {image_size: 32, patch_size: 8, width: 32, layers: 1, head_width: 16}
    text_cfg: {context_length: 77, vocab_size: 49408, width: 32, heads: 2, layers: 1}
data: {workers: 0}
train: {steps: 3, batch_size: 8, log_every: 1, checkpoint_every: 1, device: cpu}
evaluation: {scenes: 20}
"""
COUNTS = {"scenes": 200, "classes": 10}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """The two recipes of the quickstart with towers of one layer."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in ("clip", "powerclip"):
        (folder / f"{name}.yaml").write_text(f"{BASE}\nobjective: {name}\n")
    return str(folder / "clip.yaml"), str(folder / "powerclip.yaml")


@pytest.fixture(autouse=True)
def tiny(recipes, monkeypatch):
    monkeypatch.setattr(quickstart, "RECIPES", recipes)


def run(output: Path, **options) -> tuple[StudyResults, str]:
    """The results, and what was printed."""
    printed = io.StringIO()
    results = run_quickstart(output, console=Console(file=printed, width=110), **options)
    return results, printed.getvalue()


@pytest.fixture(scope="module")
def finished(recipes, tmp_path_factory):
    """A quickstart that has run once: its folder, its results, what it printed."""
    output = tmp_path_factory.mktemp("runs") / "quickstart"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "RECIPES", recipes)
        return output, *run(output)


def test_it_trains_both_models_and_writes_table_report_and_heatmaps(finished):
    output, results, printed = finished
    for text in ("PowerCLIP", "swap two attributes", "in caption: its own", "report.html", "step 2/3"):
        assert text in printed
    for section in ("Retrieval", "Zero-shot", "Composition", "Pointing game", "Training"):
        assert f"│ {section} " in printed
    written = json.loads((output / "results.json").read_text())
    assert set(written["settings"]) == {"clip", "powerclip"}
    assert written["settings"]["clip"]["runs"]["0"]["scores"] == results["clip"][0].scores
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "Alignment loss" in page
    assert "Among 20 new scenes" in page
    with Image.open(output / "heatmaps.png") as image:
        image.load()
    assert (output / "seed-0" / "powerclip" / "model" / "open_clip_config.json").is_file()


def test_a_finished_quickstart_is_not_trained_again_unless_the_recipe_changed(finished, tmp_path):
    output = tmp_path / "copy"
    shutil.copytree(finished[0], output)
    model = output / "seed-0" / "clip" / "model" / "open_clip_model.safetensors"
    written = model.stat().st_mtime_ns
    again, printed = run(output)
    assert again == finished[1]
    assert model.stat().st_mtime_ns == written
    assert printed.count("(finished before)") == 2
    run(output, steps=2, quiet=True)
    assert model.stat().st_mtime_ns != written
    assert json.loads((output / "results.json").read_text())["settings"]["clip"]["runs"]["0"]["steps"] == 2


def test_an_interrupted_quickstart_continues_and_ends_the_same(finished, tmp_path, monkeypatch):
    train = pool.train

    def interrupted(*args, **kwargs):
        def stop(state):
            if state.step == 2:
                raise KeyboardInterrupt

        return train(*args, **{**kwargs, "on_step": stop})

    monkeypatch.setattr(pool, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, quiet=True)
    monkeypatch.setattr(pool, "train", train)
    continued, printed = run(tmp_path)
    assert "continues after step 2" in printed
    for name in ("clip", "powerclip"):
        assert continued[name][0].scores == finished[1][name][0].scores


def test_a_run_that_fails_is_an_error_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "RECIPES", tuple(map(str, _diverging(tmp_path))))
    with pytest.raises(UserError, match="powerclip, seed 0: training diverged"):
        run(tmp_path / "out")


def _diverging(folder: Path) -> list[Path]:
    """The recipes, of which the second has an absurd weight decay."""
    written = []
    for name, more in (("clip", ""), ("powerclip", "optim: {weight_decay: 1.0e+36}\n")):
        base = BASE.replace("device: cpu", "device: cpu, max_skipped: 0")
        written.append(folder / f"{name}.yaml")
        written[-1].write_text(f"{base}\nobjective: {name}\n{more}")
    return written


def test_several_seeds_show_their_standard_deviation(tmp_path):
    results, printed = run(tmp_path, seeds=2, steps=1, quiet=True)
    assert {name: list(runs) for name, runs in results.items()} == {"clip": [0, 1], "powerclip": [0, 1]}
    assert "mean ± sd of 2 seeds" in printed
    assert " ± " in printed.split("image → text, R@1")[1].splitlines()[0]


def test_an_output_that_is_a_file_and_impossible_numbers_are_refused(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        run_quickstart(tmp_path / "taken")
    with pytest.raises(UserError, match="seeds must be at least 1"):
        run_quickstart(tmp_path / "new", seeds=0)
    assert not (tmp_path / "new").exists()


# ---- the table -------------------------------------------------------------------------------------------------------


def made(clip: float, ours: float) -> StudyResults:
    """Results in which every score of a model is the same."""
    recalls = [f"retrieval/{side}_retrieval_recall@{k}" for side in ("text", "image") for k in CUTOFFS]
    kinds = [f"composition/{kind}/acc" for kind in KINDS]
    points = [f"pointing/pointing_{way}{which}" for way in ("words", "text") for which in ("", "_any")]
    keys = [*recalls, "zero_shot/acc1", "zero_shot/acc5", *kinds, "composition/mean_kind_acc", *points]
    chance = {"scenes/pointing/pointing_chance": 0.07, "scenes/pointing/pointing_chance_any": 0.2}
    return {
        name: {0: Results(1, 1.0, None, {**{f"scenes/{key}": score for key in keys}, **chance}, {})}
        for name, score in (("clip", clip), ("powerclip", ours))
    }


def rows(clip: float, ours: float) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Section and label → the cells' texts and marks; training took 140.4 and 163 seconds."""
    results = made(clip, ours)
    seconds = {"clip": [140.4], "powerclip": [163.0]}
    table = quickstart_table(lines(results, COUNTS), results, seconds, [0])
    return {(row.section, row.label): [(cell.text, cell.mark) for cell in row.cells] for row in table.rows}


def test_every_measure_of_the_evaluation_is_a_row_with_its_chance_level():
    table = rows(0.412, 0.523)
    assert len(table) == 6 + 2 + 8 + 4 + 1
    assert table["Retrieval", "image → text, R@5"] == [("2.5", ""), ("41.2", ""), ("52.3", "best"), ("+11.1", "")]
    assert table["Zero-shot", "unseen pairs, top 1"][0] == ("10.0", "")
    assert table["Composition", "mean"][0] == ("50.0", "")
    assert table["Pointing game", "in caption: its own"][0] == ("7.0", "")
    assert table["Pointing game", "in caption: any"][0] == ("20.0", "")


def test_a_draw_as_printed_is_a_draw_and_time_is_no_contest():
    assert rows(0.5, 0.4996)["Composition", "mean"][1:] == [("50.0", ""), ("50.0", ""), ("0.0", "")]
    assert rows(0.5, 0.4)["Composition", "mean"][1:] == [("50.0", "best"), ("40.0", ""), ("−10.0", "")]
    assert rows(0.5, 0.4)["Training", "time"] == [("", ""), ("140 s", ""), ("163 s", ""), ("+23 s", "")]
