"""What a recipe asks to be measured: one number, whichever command and however many processes measure it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mini_corpus import png, write_shard
from PIL import Image
from rank_workers import run_whole
from rich.console import Console
from spawned_ranks import spawn_ranks
from tiny_run import write_tiny

from powerclip.compare.run import RunOptions, compare_study
from powerclip.compare.study import read_study
from powerclip.data.tokens import CaptionTokenizer
from powerclip.encoders import load
from powerclip.errors import UserError
from powerclip.evaluate import embedder
from powerclip.evaluate.embedder import Embedder
from powerclip.evaluate.images import TarImages
from powerclip.evaluate.readers import read_path
from powerclip.evaluate.runner import evaluate_model, read_records
from powerclip.train.evaluation import describe
from powerclip.train.loop import train
from powerclip.train.recipe import load_recipe

COLOURS = ("red", "green", "blue", "grey")
VALIDATION = 520
RECALLS = [f"{side}_retrieval_recall@{k}" for side in ("image", "text") for k in (1, 5, 10)]


def wide_shard(path: Path, count: int, seed: int) -> Path:
    """Images three times as wide as high: a centre crop and a squashed image differ in most of what they show."""
    members: list[tuple[str, bytes | str]] = []
    for number in range(count):
        coarse = np.random.default_rng((seed, number)).integers(0, 256, (4, 12, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((96, 32), Image.Resampling.NEAREST).save(file, "png")
        captions = [f"a {COLOURS[number % 4]} image number {number}", f"view {number * 7 % count}"][: 1 + number % 2]
        members += [(f"{number:04d}.png", file.getvalue()), (f"{number:04d}.json", json.dumps({"captions": captions}))]
    return write_shard(path, members)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    wide_shard(folder / "train.tar", 24, 0)
    # More images than one chunk and more captions than one batch, so that two ranks both have work.
    wide_shard(folder / "val.tar", VALIDATION, 1)
    return folder


def settings(folder: Path, source: str) -> list[str]:
    return [
        f"data.source={source}",
        f"data.shards={folder}/train.tar",
        "data.trees=flat",
        f"evaluation.retrieval={folder}/val.tar",
        "data.workers=0",
        "train.steps=3",
        "train.evaluate_every=2",
        "train.checkpoint_every=0",
    ]


def scores_of(results: Path) -> dict[str, float]:
    scores = json.loads(results.read_text())["scores"]
    return {name.removeprefix("retrieval/"): value for name, value in scores.items()}


def score(model: str, tar: Path, resize_mode: str) -> dict[str, float]:
    """What a model scores when it prepares images so."""
    encoder, _, tokenizer = load(model)
    encoder.clip.visual.preprocess_cfg = {**encoder.clip.visual.preprocess_cfg, "resize_mode": resize_mode}
    return read_path(tar).score(Embedder(encoder, CaptionTokenizer(tokenizer))).flat()


def preprocessing(model: str) -> dict[str, Any]:
    return load(model)[0].clip.visual.preprocess_cfg


@pytest.mark.parametrize("source", ["shards", "corpus"])
def test_train_compare_and_evaluate_give_the_same_retrieval_to_the_last_digit(folder, source, tmp_path):
    recipe = write_tiny(tmp_path)
    train(load_recipe(recipe, settings(folder, source)), tmp_path / "run", quiet=True)
    from_train = scores_of(tmp_path / "run" / "results.json")
    assert list(from_train) == [*RECALLS, "mean_recall"]
    assert 0 < from_train["mean_recall"] < 1

    model = str(tmp_path / "run" / "model")
    done = evaluate_model(model, [folder / "val.tar"], output=tmp_path / "evaluated", device="cpu", quiet=True)
    assert done.results["val"][0]["metrics"] == from_train
    assert preprocessing(model)["resize_mode"] == ("squash" if source == "corpus" else "shortest")
    assert score(model, folder / "val.tar", "squash") != score(model, folder / "val.tar", "shortest")

    (tmp_path / "study.yaml").write_text(f"base: {recipe}\nsettings:\n  powerclip: {{}}\n")
    study = read_study([str(tmp_path / "study.yaml")], settings(folder, source))
    compare_study(study, tmp_path / "study", [0], RunOptions(quiet=True), [folder / "val.tar"])
    assert scores_of(tmp_path / "study" / "powerclip" / "seed-0" / "results.json") == from_train
    tested = json.loads((tmp_path / "study" / "test.json").read_text())["settings"]["powerclip"]["runs"]["0"]["scores"]
    assert {name.removeprefix("val/"): value for name, value in tested.items()} == from_train


def test_two_ranks_score_what_one_does_to_the_last_digit(folder, tmp_path):
    # No step changes the weights, so that the two runs have the same model.
    overrides = [*settings(folder, "shards"), "optim.lr=0", "evaluation.scenes=20"]
    (one,) = spawn_ranks(1, run_whole, tmp_path / "one", tmp_path / "one" / "run", None, *overrides)
    two = spawn_ranks(2, run_whole, tmp_path / "two", tmp_path / "two" / "run", None, *overrides)
    assert two == [one, one]
    assert {name.split("/")[0] for name in one} == {"retrieval", "scenes"}


def test_a_run_on_collective_scenes_is_measured_on_sets_as_evaluate_does(tmp_path):
    tiny = write_tiny(tmp_path)
    recipe = load_recipe(tiny, ["data.collective=true", "data.workers=2", "train.steps=2", "evaluation.scenes=20"])
    assert recipe.data.collective == 1.0
    scores = train(recipe, tmp_path / "run", quiet=True).results.scores
    evaluate_model(str(tmp_path / "run" / "model"), [], scenes=20, output=tmp_path / "results", quiet=True)
    [record] = read_records(tmp_path / "results" / "scenes_grounding.json")
    measured = {name: value for name, value in record["metrics"].items() if value is not None}
    assert {f"scenes/grounding/{name}": value for name, value in measured.items()}.items() <= scores.items()
    assert "set_f1_words_several" in measured
    assert not any(
        "grounding" in name
        for name in train(
            load_recipe(tiny, ["train.steps=1", "evaluation.scenes=10"]), tmp_path / "other", quiet=True
        ).results.scores
    )


def test_zero_shot_classification_is_measured_on_the_way_as_evaluate_measures_it(tmp_path):
    animals = tmp_path / "animals"
    for number, name in enumerate(("bear", "dog", "goat")):
        (animals / name).mkdir(parents=True)
        for side in (16, 24):
            Image.new("RGB", (side, side), (80 * number, side, 255 - 80 * number)).save(animals / name / f"{side}.png")
    overrides = ["evaluation.classification=" + str(animals), "train.evaluate_every=2", "train.steps=4"]
    result = train(load_recipe(write_tiny(tmp_path), overrides), tmp_path / "run", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "evaluate/classification/acc1" in row] == [2, 4]
    done = evaluate_model(str(tmp_path / "run"), [animals], output=tmp_path / "out", device="cpu", quiet=True)
    assert result.results.scores["classification/acc1"] == done.results["animals"][0]["metrics"]["acc1"]
    pairs = load_recipe(write_tiny(tmp_path), [f"evaluation.classification={wide_shard(tmp_path / 'pairs.tar', 4, 0)}"])
    with pytest.raises(UserError, match=r"evaluation\.classification: .* holds no images with classes"):
        train(pairs, tmp_path / "no", quiet=True)


def test_damaged_images_show_before_anything_is_written(tmp_path):
    broken = write_shard(tmp_path / "val.tar", [("a.png", b"no image"), ("a.txt", "a cat")])
    with pytest.raises(UserError, match=r"1 of 1 images cannot be read .*val\.tar: a\.png"):
        train(load_recipe(write_tiny(tmp_path), [f"evaluation.retrieval={broken}"]), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_an_image_that_is_left_out_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(embedder, "TOLERANCE", 0.5)  # of 0.1 %
    members = [("a.png", b"no image"), ("a.txt", "a cat"), ("b.png", png()), ("b.txt", "a dog")]
    shard, printed = write_shard(tmp_path / "val.tar", members), io.StringIO()
    recipe = load_recipe(write_tiny(tmp_path), [f"evaluation.retrieval={shard}", "train.steps=1"])
    result = train(recipe, tmp_path / "run", quiet=True, console=Console(file=printed, width=200))
    assert f"evaluation.retrieval: 1 unreadable images are left out: {shard}: a.png" in printed.getvalue()
    assert result.results.scores["retrieval/mean_recall"] == 1.0


def test_images_are_decoded_once_for_all_evaluations_of_a_run(folder, tmp_path, monkeypatch):
    seen = []
    original = TarImages.decode
    monkeypatch.setattr(TarImages, "decode", lambda self, content: seen.append(1) or original(self, content))
    train(load_recipe(write_tiny(tmp_path), settings(folder, "shards")), tmp_path / "run", quiet=True)
    assert len(seen) == VALIDATION


def test_scores_become_one_line():
    scores = {
        "retrieval/mean_recall": 0.127,
        "retrieval/text_retrieval_recall@1": 0.05,
        "retrieval/image_retrieval_recall@1": 0.041,
        "composition/acc": 0.55,
        "composition/acc_standard_error": 0.022,
        "composition/swap_obj/acc": 0.6,
        "scenes/retrieval/mean_recall": 0.5,
        "scenes/pointing/pointing_words": 0.25,
        "scenes/pointing/pointing_chance": 0.1,
    }
    assert describe(scores) == (
        "retrieval 12.7 (R@1: text 5.0, image 4.1)  composition 55.0 ± 2.2  scenes: retrieval 50.0, pointing 25.0"
    )
    assert describe({}) == ""
    assert describe({"chance": 0.5}) == "chance 50.0"
