"""The captions10k recipes from the command line, end to end: on a few plain images, and on the photographs."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

import pytest

from powerclip import cli
from powerclip.train.recipe import differences, load_recipe

TINY = [
    "model.config.embed_dim=32",
    "model.config.vision_cfg.width=32",
    "model.config.vision_cfg.head_width=32",
    "model.config.vision_cfg.layers=1",
    "model.config.text_cfg.width=32",
    "model.config.text_cfg.heads=1",
    "model.config.text_cfg.layers=1",
    "train.device=cpu",
    "train.steps=3",
    "optim.warmup=0",
]


@pytest.fixture
def small_data(mini_corpus, tmp_path, monkeypatch) -> Path:
    """A folder that is laid out as the recipes expect it, with 12 plain images to train on."""
    folder = tmp_path / "data"
    shutil.copytree(mini_corpus, folder / "captions10k", ignore=shutil.ignore_patterns("sugarcrepe", "*.tsv"))
    shutil.copytree(mini_corpus / "sugarcrepe", folder / "sugarcrepe")
    trees = (mini_corpus / "trees.tsv").read_bytes()
    (folder / "captions10k" / "trees.tsv.gz").write_bytes(gzip.compress(trees))
    monkeypatch.setenv("POWERCLIP_DATA", str(folder))
    return folder


def powerclip(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["powerclip", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code


def check_train_and_compare(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> None:
    powerclip(monkeypatch, "train", "--recipe", "captions10k/clip", *TINY, *overrides, "--output", folder / "run")
    results = json.loads((folder / "run" / "results.json").read_text())
    assert {"retrieval/mean_recall", "composition/acc"} <= results["scores"].keys()
    assert (folder / "run" / "model").is_dir()
    recipes = ["captions10k/clip", "captions10k/powerclip", "captions10k/paper"]
    powerclip(monkeypatch, "compare", *recipes, *TINY, *overrides, "--seeds", 2, "--output", folder / "study")
    table = (folder / "study" / "table.md").read_text()
    assert all(f"\n| {name} |" in table for name in ("clip", "powerclip", "paper"))
    compared = json.loads((folder / "study" / "results.json").read_text())
    # The same recipe and seed score the same, alone and in a study.
    assert compared["settings"]["clip"]["runs"]["0"]["scores"] == results["scores"]


def test_train_and_compare_work_end_to_end(small_data, tmp_path, monkeypatch, capsys):
    check_train_and_compare(monkeypatch, tmp_path, "train.batch_size=6")
    printed = capsys.readouterr().out
    assert "12 images, 18 captions" in printed
    assert "3 comparisons, 1 left out: their images are not there" in printed


def test_train_and_compare_work_on_photographs(real_data, tmp_path, monkeypatch):
    shards = "data.shards=${POWERCLIP_DATA}/captions10k/train-010.tar"
    check_train_and_compare(monkeypatch, tmp_path, shards, "train.batch_size=32")


def test_the_recipes_differ_in_what_their_names_say():
    clip, ours, paper = (load_recipe(f"captions10k/{name}") for name in ("clip", "powerclip", "paper"))
    changed = {"objective", "alignment", "optim.lr"}
    assert {part for line in differences(clip, ours) if (part := _part(line)) not in changed} == set()
    assert {_part(line) for line in differences(ours, paper)} == {"alignment", "optim.lr"}
    assert clip.optim == paper.optim
    assert paper.alignment.preset == "paper"


def _part(difference: str) -> str:
    """What a line of `differences` is about: a section, or one value of the optimiser."""
    key = difference.split(":")[0]
    return key if key.startswith("optim.") else key.split(".")[0]


def test_the_towers_are_of_the_size_that_the_recipe_says():
    from powerclip.encoders import build

    config = load_recipe("captions10k/clip").model.config
    encoder = build(config=config)
    assert encoder.grid == (14, 14)
    assert sum(p.numel() for p in encoder.parameters()) == pytest.approx(25e6, rel=0.1)
