"""Epochs: as many steps as the data, or the recipe's number of samples, make of them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tiny_run import tiny, write_tiny

from powerclip.errors import UserError
from powerclip.runtime.signals import Preempted
from powerclip.train.loop import train
from powerclip.train.recipe import load_recipe, parse_recipe
from powerclip.train.results import read_results


def on_corpus(folder: Path, corpus: Path, *overrides: str):
    data = ["data.source=corpus", f"data.shards={corpus}/train-*.tar", "data.trees=flat"]
    return tiny(folder, *data, "train.epochs=3", *overrides)


def test_steps_follow_from_the_number_of_samples_that_a_recipe_gives(tmp_path):
    assert tiny(tmp_path, "data.samples=103", "train.epochs=2.5").train.steps == 62  # 25 whole batches of 4 an epoch
    assert load_recipe("cc12m/clip").train.steps == 32 * (10_968_539 // 4096)
    with pytest.raises(UserError, match=r"train\.batch_size is 4, but data\.samples is only 3"):
        tiny(tmp_path, "data.samples=3", "train.epochs=1")


def test_the_later_of_steps_and_epochs_counts_and_both_in_one_file_are_refused(tmp_path):
    assert load_recipe("cc12m/clip", ["train.steps=7", "optim.warmup=0"]).train.steps == 7
    assert load_recipe("cc12m/clip", ["train.steps=7", "train.epochs=1", "optim.warmup=0"]).train.steps == 2677
    child = tmp_path / "child.yaml"
    write_tiny(tmp_path)
    child.write_text("extends: tiny.yaml\ntrain: {steps: 3, epochs: 1}\n")
    with pytest.raises(UserError, match="both say how long"):
        load_recipe(child)


@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan"])
def test_a_length_that_is_none_is_refused(tmp_path, value):
    with pytest.raises(UserError, match=r"train\.epochs must be positive"):
        tiny(tmp_path, f"train.epochs={value}")


def test_without_a_number_of_samples_the_data_are_counted(tmp_path, mini_corpus):
    train(on_corpus(tmp_path, mini_corpus), tmp_path / "run", quiet=True)
    assert read_results(tmp_path / "run" / "results.json").steps == 9  # 12 images, 3 batches of 4, 3 times
    begun = parse_recipe((tmp_path / "run" / "recipe.yaml").read_text(), "snapshot")
    assert (begun.train.steps, begun.train.epochs) == (9, 3)


def test_a_run_of_epochs_resumes_unless_the_data_have_changed(tmp_path, mini_corpus):
    def stop(state):
        if state.step == 2:
            signal.raise_signal(signal.SIGTERM)

    run = tmp_path / "run"
    with pytest.raises(Preempted):
        train(on_corpus(tmp_path, mini_corpus), run, quiet=True, on_step=stop)
    fewer = on_corpus(tmp_path, mini_corpus, f"data.shards={mini_corpus}/train-000.tar")
    with pytest.raises(UserError, match="another recipe"):
        train(fewer, run, quiet=True, resume=True)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "train-000.tar").symlink_to(mini_corpus / "train-000.tar")
    snapshot = run / "recipe.yaml"
    snapshot.write_text(snapshot.read_text().replace(str(mini_corpus), str(moved)))  # half of the data are gone
    with pytest.raises(UserError, match=r"train\.steps: 9 → 3"):
        train(on_corpus(tmp_path, moved), run, quiet=True, resume=True)
    snapshot.write_text(snapshot.read_text().replace(str(moved), str(mini_corpus)))
    assert train(on_corpus(tmp_path, mini_corpus), run, quiet=True, resume=True).results.steps == 9


def test_data_without_an_end_need_a_number(tmp_path):
    with pytest.raises(UserError, match=r"scenes has no end; give train\.steps, or data\.samples"):
        train(tiny(tmp_path, "train.epochs=2"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
