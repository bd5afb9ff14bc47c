"""An export is complete or not there: after a difference over the bound, a full disk, a kill; and its card."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from tiny_model import save_tiny_model, tiny_model

from powerclip.encoders import load
from powerclip.errors import UserError
from powerclip.export import folder as export_folder
from powerclip.export.card import describe_run, model_card
from powerclip.export.check import Checker, Parity, check_bound, read_data, scene_data
from powerclip.export.folder import CheckOptions, export_model
from powerclip.export.processor import image_processor
from powerclip.runtime.files import draft_folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files above `size` bytes cannot be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- all or nothing --------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_nothing_and_is_one_line(saved, tmp_path):
    with largest_file(300_000), pytest.raises(UserError, match=r"out: could not write the export: File too large"):
        export_model(saved, "pt2", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_is_not_there_and_the_next_one_clears_up(saved, tmp_path, monkeypatch):
    loaded = load(saved)

    def write_half_and_die(*arguments: object, **keywords: object) -> None:
        (arguments[2] / "vision_model.pt2").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        export_folder.load = lambda source: loaded
        export_folder.write_format = write_half_and_die
        export_model(saved, "pt2", tmp_path / "out")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert [path.name.startswith(".out.") for path in tmp_path.iterdir()] == [True]

    monkeypatch.setattr(export_folder, "write_format", lambda *_, **__: None)
    export_model(saved, "pt2", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_draft_replaces_a_folder_only_when_it_is_finished(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    with contextlib.suppress(RuntimeError), draft_folder(target) as draft:
        (draft / "new").touch()
        raise RuntimeError("the export failed")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]
    with draft_folder(target) as draft:
        (draft / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_what_is_in_the_folder_stays_unless_told_otherwise(saved, tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UserError, match="is not empty; use --overwrite"):
        export_model(saved, "onnx", tmp_path)
    with pytest.raises(UserError, match="is a file"):
        export_model(saved, "onnx", tmp_path / "mine.txt")


# ---- the check -------------------------------------------------------------------------------------------------------


def test_a_difference_over_the_bound_leaves_nothing(saved, tmp_path, monkeypatch):
    other = tiny_model()
    with torch.no_grad():
        other.clip.visual.proj[0].add_(1e-2)

    class Other:
        def run(self, tower, values):
            with torch.inference_mode():
                outputs = other.encode_patches(values) if tower == "vision_model" else other.encode_words(values)
            names = ("image_embeds", "patch_embeds") if tower == "vision_model" else ("text_embeds", "token_embeds")
            return dict(zip(names, outputs, strict=True))

    monkeypatch.setattr(export_folder, "write_format", lambda model, tokenizer, draft, *_, **__: None)
    monkeypatch.setattr(export_folder, "open_export", lambda *_: Other())
    monkeypatch.setattr(Checker, "_other_tokens", lambda *_: 0)
    monkeypatch.setattr(Checker, "_processor_difference", lambda *_: 0.0)
    with pytest.raises(UserError, match=r"the pt2 export in fp32 differs from the model: \w+ by \S+, more than 1e-05"):
        export_model(saved, "pt2", tmp_path / "out", check=CheckOptions())
    assert list(tmp_path.iterdir()) == []
    export_model(saved, "pt2", tmp_path / "out", check=CheckOptions(bound=1.0))


def test_not_a_number_is_over_every_bound():
    parity = Parity("onnx", "int8", "scenes", {"image_embeds": float("inf")}, 0.0, 0.5)
    with pytest.raises(UserError, match="image_embeds by inf"):
        check_bound(parity, 1e9)


def test_parity_can_be_measured_on_a_users_own_images(mini_corpus):
    data = read_data(next(mini_corpus.glob("*.tar")), limit=3)
    assert len(data.images) == 3
    assert data.image_of_caption.max() == 2
    assert len(data.captions) == len(data.image_of_caption)
    with pytest.raises(UserError, match="there is no file or folder"):
        CheckOptions(Path("missing.csv")).read(tiny_model())


def test_images_that_are_resized_in_a_way_transformers_cannot_are_refused():
    model = tiny_model()
    assert image_processor(model)["size"] == {"shortest_edge": 32}
    model.clip.visual.preprocess_cfg["resize_mode"] = "squash"
    squashed = image_processor(model)
    assert squashed["size"] == {"height": 32, "width": 32}
    assert not squashed["do_center_crop"]
    model.clip.visual.preprocess_cfg["resize_mode"] = "longest"
    with pytest.raises(UserError, match="resize_mode 'longest'"):
        image_processor(model)


# ---- the card --------------------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A run of a study with three seeds; its recipe names a folder of the machine."""
    run = tmp_path / "study" / "powerclip" / "seed-0"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(
        "model: {name: ViT-B-32}\ndata: {source: shards, shards: /home/someone/secret/train-000.tar}\n"
        "train: {steps: 10, batch_size: 8}\n"
    )
    scores = {"val/mean_recall": 0.25}
    results = {"steps": 10, "seconds": 1.0, "seconds_per_step": 0.1, "scores": scores, "last": {}, "format": 2}
    (run / "results.json").write_text(json.dumps(results))
    summary = {"val/mean_recall": {"mean": 24.0, "std": 1.5, "seeds": 3}, "seconds_per_step": 0.1}
    content = {"settings": {"clip": {"summary": {}}, "powerclip": {"summary": summary}}}
    (run.parent.parent / "results.json").write_text(json.dumps(content))
    save_tiny_model(run / "model")
    return run


def test_a_card_tells_data_recipe_scores_with_their_spread_and_parity(study):
    parity = Parity("onnx", "int8", "300 images of val.tar", {"image_embeds": 0.0123}, 0.2411, 0.25, 0, 0.02)
    card = model_card(
        "org/name", tiny_model(), describe_run(study / "model"), [parity], contents={"open_clip", "hf", "onnx"}
    )
    head = yaml.safe_load(card.split("---")[1])
    assert head["license_name"] == "fill-in"
    assert "| val/mean_recall | 25.0 | 24.0 ± 1.5 |" in card
    assert "mean ± sd of 3 seeds" in card
    assert "10 × 8 = 80 pairs" in card
    assert "…/train-000.tar" in card
    assert "someone" not in card
    assert "300 images of val.tar" in card
    assert "| onnx int8 | image_embeds 1e-02 | 24.11 | 25.00 |" in card
    for way in ('powerclip.load("hf-hub:org/name")', 'create_model_from_pretrained("hf-hub:org/name")',
                'CLIPModel.from_pretrained("org/name")', "onnxruntime.InferenceSession"):  # fmt: skip
        assert way in card


def test_the_run_is_found_from_its_folder_and_from_its_model(study):
    assert describe_run(study) == describe_run(study / "model") == describe_run(f"local-dir:{study / 'model'}")
    assert describe_run("ViT-B-32") is None


def test_a_card_without_a_run_says_that_nothing_is_known():
    card = model_card("folder", tiny_model(), None, contents={"pt2"})
    assert "Nothing is known here about how this model was trained" in card
    assert "Not measured: `powerclip export … --check` does." in card


def test_scenes_are_drawn_at_the_models_size():
    assert scene_data(tiny_model(), count=2).images[0].size == (32, 32)
