"""A dry run says what would run, measures a moment of it, and writes nothing."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_run import tiny, write_tiny
from typer.testing import CliRunner

from powerclip import cli
from powerclip.annotate.parsers import load_parser
from powerclip.annotate.tree_annotator import TreeAnnotator
from powerclip.errors import UserError
from powerclip.train import dry_run as module
from powerclip.train.dry_run import Burst, dry_run, measure
from powerclip.train.loop import train
from powerclip.train.memory import activation_bytes, count, synthetic_batch
from powerclip.train.state import start


def said(recipe, output: Path) -> str:
    printed = io.StringIO()
    dry_run(recipe, output, console=Console(file=printed, width=200))
    return printed.getvalue()


def test_it_tells_size_length_cost_and_output_and_leaves_nothing_behind(tmp_path):
    recipe = tiny(tmp_path, "data.samples=100", "train.epochs=3", "train.checkpoint_minutes=5")
    text = said(recipe, tmp_path / "run")
    state = start(recipe)
    assert f"{count(state.encoder) / 1e6:.1f} M parameters" in text
    assert "75 steps × 4 pairs = 300 pairs, 3 epochs of 100" in text
    assert re.search(r"memory +about [\d.]+ GiB", text)
    assert re.search(r"time +0:\d\d:\d\d for the run, [\d.]+ s a step", text)
    assert "every 5 steps and every 5 minutes, the last 2 kept" in text
    assert f"{tmp_path / 'run'}: free" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


def test_data_that_are_missing_are_listed_and_the_rest_is_told(tmp_path):
    recipe = tiny(tmp_path, "data.source=shards", "data.shards=${NOT_SET_HERE}/*.tar", "train.epochs=2")
    text = said(recipe, tmp_path / "run")
    assert "data.shards: MISSING: ${NOT_SET_HERE}/*.tar: the environment variable NOT_SET_HERE is not set" in text
    assert "2 epochs; how many steps that is shows when the data are there" in text
    assert "for the run" not in text
    assert "memory" in text


def test_data_that_are_there_are_counted_without_an_index_being_written(tmp_path, mini_corpus):
    before = sorted(mini_corpus.iterdir())
    settings = ["data.source=corpus", f"data.shards={mini_corpus}/train-*.tar", f"data.trees={mini_corpus}/trees.tsv"]
    text = said(tiny(tmp_path, *settings, "train.epochs=3"), tmp_path / "run")
    assert "9 steps × 4 pairs = 36 pairs, 3 epochs of 12" in text
    assert sorted(mini_corpus.iterdir()) == before


def test_what_decides_the_loss_is_told_in_the_papers_letters(tmp_path):
    text = said(tiny(tmp_path, "alignment.preset=paper", "alignment.gamma=0.5", "alignment.tau=0.01"), tmp_path / "run")
    assert "preset paper: loss triplet, γ 0.5, negatives hardest, λ 0.1" in text
    assert "nla, sums, α 0.75, τ 0.01, best sets of any size" in text
    assert "M 3 random boxes an image; trees of captions" in text
    assert "trees: the scenes' own" in text


def test_missing_sidecars_and_packages_are_found(tmp_path, mini_corpus, monkeypatch):
    monkeypatch.setattr("powerclip.train.inputs.find_spec", lambda name: None)
    shards = f"data.shards={mini_corpus}/train-*.tar"
    overrides = ["data.source=shards", shards, "data.trees=sidecars", "regions.kind=segments", "train.wandb=photos"]
    text = said(tiny(tmp_path, *overrides), tmp_path / "run")
    for kind in ("trees", "regions"):
        assert f"{kind}: MISSING: data.sidecars: no shard has its {kind} beside them" in text
        assert f"`powerclip annotate {kind} '{mini_corpus}/train-*.tar'`" in text
    assert "train.wandb: MISSING: the package wandb is not installed: pip install 'powerclip[wandb]'" in text
    parsed = said(tiny(tmp_path, "data.source=shards", shards), tmp_path / "run")
    assert "trees: sidecars where there are some, the embedded parser for the rest" in parsed
    trees = ["data.source=corpus", shards, f"data.trees={mini_corpus}/trees.tsv"]
    for tar in mini_corpus.glob("train-*.tar"):
        shutil.copy(tar, tmp_path)
    TreeAnnotator(load_parser("flat")).annotate(str(tmp_path / "train-000.tar"))
    beside = said(tiny(tmp_path, "data.source=shards", f"data.shards={tmp_path}/train-*.tar"), tmp_path / "run")
    assert "trees: 1 of 2 sidecars beside the data" in beside
    assert f"trees: {mini_corpus}/trees.tsv" in said(tiny(tmp_path, *trees), tmp_path / "run")


def test_missing_weights_are_found_and_what_is_trained_is_told(tmp_path):
    recipe = tiny(tmp_path, f"model.pretrained={tmp_path}/nowhere.safetensors", "train.freeze=image", "train.lora=2")
    text = said(recipe, tmp_path / "run")
    assert f"model.pretrained: MISSING: the model config: no weights file {tmp_path}/nowhere.safetensors" in text
    assert "of them (freeze image, LoRA of rank 2)" in text


def test_what_the_folder_holds_is_told(tmp_path):
    recipe = tiny(tmp_path, "train.steps=2")
    train(recipe, tmp_path / "run", quiet=True)
    assert "holds a finished run" in said(recipe, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    assert "--resume continues it" in said(recipe, tmp_path / "run")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    assert "choose another" in said(recipe, tmp_path / "photos")


def test_a_burst_on_a_cpu_grows_until_it_is_long_enough_and_is_extrapolated_in_a_line(tmp_path, monkeypatch):
    recipe = tiny(tmp_path)
    monkeypatch.setattr(module, "time_steps", lambda recipe, state, batch, **_: 0.2 + 0.1 * len(batch))
    burst = measure(recipe, start(recipe), 1000)
    assert burst.pairs == 16  # 0.4, 0.6, 1.0 and 1.8 seconds
    assert burst.step(1000) == pytest.approx(100.2)
    assert Burst(8, 1.0, 0.0, 16, None).step(2) == 1.0


def test_kept_activations_grow_with_the_pairs_and_not_with_the_parameters(tmp_path):
    recipe = tiny(tmp_path)
    state = start(recipe)
    two, six = (activation_bytes(state, pairs) for pairs in (2, 6))
    assert six == pytest.approx(two, rel=0.2)  # of one pair
    assert two < 4 * count(state.encoder)


def test_the_messages_of_several_ranks_are_told_once(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "from each of 2 ranks" in said(tiny(tmp_path), tmp_path / "run")
    monkeypatch.setenv("RANK", "1")
    assert said(tiny(tmp_path), tmp_path / "run") == ""


def test_a_model_that_cannot_be_built_is_refused(tmp_path):
    with pytest.raises(UserError):
        said(tiny(tmp_path, "model.config.vision_cfg.hed_width=8"), tmp_path / "run")


def test_a_backend_that_cannot_run_here_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"alignment\.backend: triton"):
        said(tiny(tmp_path, "alignment.backend=triton"), tmp_path / "run")


def test_synthetic_images_have_the_shape_of_the_model(tmp_path):
    recipe = tiny(tmp_path)
    batch = synthetic_batch(recipe, start(recipe).encoder, 3)
    assert batch.images.shape == (3, 3, 16, 16)
    assert batch.regions.shape == (3, 3, 4)
    assert torch.equal(batch.images, synthetic_batch(recipe, start(recipe).encoder, 3).images)


def test_the_command_line_rehearses_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["train", "--recipe", str(write_tiny(tmp_path)), "--dry-run", "train.steps=3"])
    assert done.exit_code == 0
    assert "3 steps × 4 pairs" in done.stdout
    assert not (tmp_path / "runs").exists()
