import io
import json
import shutil

import pytest
from PIL import Image
from rich.console import Console

from powerclip.compare import quickstart
from powerclip.errors import UserError

BASE = """
model:
  config:
    embed_dim: 16
    vision_cfg: {image_size: 32, patch_size: 8, width: 32, layers: 1, head_width: 16}
    text_cfg: {context_length: 77, vocab_size: 49408, width: 32, heads: 2, layers: 1}
data: {workers: 0}
train: {steps: 3, batch_size: 8, log_every: 1, checkpoint_every: 1, device: cpu}
"""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """The two recipes of the quickstart with towers of one layer."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in ("clip", "powerclip"):
        (folder / f"{name}.yaml").write_text(f"{BASE}\nobjective: {name}\n")
    return {"CLIP": str(folder / "clip.yaml"), "PowerCLIP-R": str(folder / "powerclip.yaml")}


@pytest.fixture(autouse=True)
def tiny(recipes, monkeypatch):
    monkeypatch.setattr(quickstart, "RECIPES", recipes)


def run(output, **options):
    """Lines of the table, and what was printed."""
    printed = io.StringIO()
    lines = quickstart.run(output, scenes=20, console=Console(file=printed, width=110), **options)
    return lines, printed.getvalue()


@pytest.fixture(scope="module")
def finished(recipes, tmp_path_factory):
    """A quickstart that has run once: its folder, its table, what it printed."""
    output = tmp_path_factory.mktemp("runs") / "quickstart"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "RECIPES", recipes)
        return output, *run(output)


def test_it_trains_both_models_and_writes_table_report_and_heatmaps(finished):
    output, lines, printed = finished
    for text in ("CLIP", "PowerCLIP-R", "swap two attributes", "in caption: its own", "report.html"):
        assert text in printed
    results = json.loads((output / "results.json").read_text())
    assert set(results["models"]) == {"CLIP", "PowerCLIP-R"}
    for runs in results["models"].values():
        assert runs[0]["seconds"] > 0
    assert "Alignment loss" in (output / "report.html").read_text(encoding="utf-8")
    with Image.open(output / "heatmaps.png") as image:
        image.load()
    assert {line.group for line in lines} == {"Retrieval", "Zero-shot", "Composition", "Pointing game", "Training"}


def test_a_finished_quickstart_is_not_trained_again_unless_the_recipe_changed(finished, tmp_path):
    output = tmp_path / "copy"
    shutil.copytree(finished[0], output)
    model = output / "seed-0" / "clip" / "model" / "open_clip_model.safetensors"
    written = model.stat().st_mtime_ns
    again, printed = run(output)
    assert again == finished[1]
    assert model.stat().st_mtime_ns == written
    assert "already trained" in printed
    run(output, steps=2, quiet=True)
    assert model.stat().st_mtime_ns != written
    assert json.loads((output / "results.json").read_text())["steps"] == 2


def test_an_interrupted_quickstart_continues_and_ends_the_same(finished, tmp_path, monkeypatch):
    train = quickstart.train

    def interrupted(*args, **kwargs):
        def stop(state):
            if state.step == 2:
                raise KeyboardInterrupt

        return train(*args, on_step=stop, **kwargs)

    monkeypatch.setattr(quickstart, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, quiet=True)
    monkeypatch.setattr(quickstart, "train", train)
    continued, printed = run(tmp_path)
    assert "continues after step 2" in printed
    for line, whole in zip(continued, finished[1], strict=True):
        assert line.unit == "s" or line == whole


def test_several_seeds_show_their_spread(tmp_path):
    lines, printed = run(tmp_path, seeds=2, steps=1, quiet=True)
    assert all(len(line.baseline) == len(line.ours) == 2 for line in lines)
    assert "mean ± sd of 2 seeds" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert [each["seed"] for each in results["models"]["CLIP"]] == [0, 1]


def test_an_output_that_is_a_file_and_impossible_numbers_are_refused(tmp_path):
    (tmp_path / "taken").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        quickstart.run(tmp_path / "taken")
    with pytest.raises(UserError, match="seeds must be at least 1"):
        quickstart.run(tmp_path / "new", seeds=0)
    assert not (tmp_path / "new").exists()
