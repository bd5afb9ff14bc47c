"""Training from shards: a recipe to a model, what is counted to the log, and what is wrong in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mini_corpus import write_shard
from tiny_run import same_weights, tiny, write_tiny
from typer.testing import CliRunner

from powerclip.cli import app
from powerclip.data.shard_loader import ShardLoader
from powerclip.errors import UserError
from powerclip.runtime.distributed import Ranks
from powerclip.train.data import make_loader
from powerclip.train.data_cache import DataCache
from powerclip.train.loop import train
from powerclip.train.metrics import read_metrics
from powerclip.train.state import start

sys.path.append(str(Path(__file__).parents[1] / "data"))
from shard_examples import caption_of, sample, write_samples, write_trees


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Two shards of 9 and 8 samples, the first with trees; one image is bad."""
    folder = tmp_path_factory.mktemp("shards")
    first, second = write_samples(folder, [9, 7])
    write_trees(first, {f"s{number:04d}": caption_of(f"s{number:04d}") for number in range(9)})
    write_shard(second, [*sample("bad", b"no image"), *(m for n in range(9, 16) for m in sample(f"s{n:04d}"))])
    return folder


def settings(folder: Path, *more: str) -> list[str]:
    return [
        "data.source=shards",
        f"data.shards={folder}/{{00000..00001}}.tar",
        "data.max_bad=0.2",
        "data.trees=sidecars",
        *more,
    ]


def test_a_recipe_of_shards_makes_their_loader(tmp_path, shards):
    recipe = tiny(tmp_path, *settings(shards, "data.seed=3", "data.window=1", "data.crop=0.5", "data.workers=0"))
    state = start(recipe)
    loader = make_loader(recipe, state.encoder)
    assert isinstance(loader, ShardLoader)
    assert loader.steps_per_epoch == 4
    batch = loader.batch(0)
    assert batch.images.shape == (4, 3, 16, 16)
    assert batch.regions.shape == (4, 3, 4)
    parts = [make_loader(recipe, state.encoder, ranks=Ranks(rank, 2)).batch(0) for rank in range(2)]
    assert torch.equal(torch.cat([part.images for part in parts]), batch.images)


def test_only_powerclip_reads_annotations(tmp_path, shards):
    for objective, expected in (("clip", False), ("powerclip", True)):
        recipe = tiny(tmp_path, *settings(shards), f"objective={objective}")
        batches = [make_loader(recipe, start(recipe).encoder).batch(step) for step in range(4)]
        assert any("flat_trees" in batch.counts for batch in batches) is expected


def test_shards_without_any_tree_are_refused_unless_the_recipe_says_flat(tmp_path):
    write_samples(tmp_path / "bare", [5, 5])
    base = settings(tmp_path / "bare", "train.steps=2", "data.trees=sidecars")
    with pytest.raises(
        UserError, match=r"no shard has its trees beside them .*annotate trees '.*bare/.*data.trees: flat"
    ):
        train(tiny(tmp_path, *base), tmp_path / "run", quiet=True)
    recipe = tiny(tmp_path, *base, "data.trees=flat")
    batch = make_loader(recipe, start(recipe).encoder).batch(0)
    assert batch.phrases.max_nodes == 1
    assert batch.counts == {}  # asked for, and nothing fell back
    for override in ("objective=clip", "alignment.parse_trees=false"):
        make_loader(tiny(tmp_path, *base, override), start(recipe).encoder).batch(0)


def test_a_run_counts_what_was_skipped_and_replaced(tmp_path, shards, capsys):
    # 17 samples; 16 batches of 4 and one sample more are four epochs, less 4 samples.
    recipe = tiny(tmp_path, *settings(shards, "train.steps=17", "train.log_every=5"))
    train(recipe, tmp_path / "run")
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert sum(row.get("bad/unreadable_image", 0) for row in rows) == 4
    without = sum(row.get("trees/no_sidecar", 0) for row in rows)
    # Seven good samples of four epochs have no tree, and perhaps one that stands in for the bad one.
    assert 28 <= without <= 32
    assert sum(row.get("flat_trees", 0) for row in rows) == without
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "2 shards, 17 samples" in printed
    assert printed.count("warning:") == 2
    assert "sample bad: " in printed


def test_a_run_that_stops_in_mid_epoch_goes_on_bit_for_bit(tmp_path, shards):
    class Stop(Exception):
        pass

    def stop(state) -> None:
        if state.step == 7:
            raise Stop

    recipe = tiny(tmp_path, *settings(shards, "train.steps=9", "data.workers=1"))
    train(recipe, tmp_path / "whole", quiet=True)
    with pytest.raises(Stop):
        train(recipe, tmp_path / "parts", quiet=True, on_step=stop)
    train(recipe, tmp_path / "parts", quiet=True, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.shards=null", r"data\.source is shards: set data\.shards"),
        ("data.trees=trees.tsv", r"data\.trees is a corpus' file"),
        ("data.window=0", r"data\.window must be at least 1"),
        ("data.max_bad=2", r"data\.max_bad must lie in \[0, 1\]"),
        ("data.shards=nowhere/*.tar", r"data\.shards: nothing matches"),
        ("data.shards=nowhere/{1..3}.tar", r"data\.shards: .*nowhere/1\.tar"),
        ("data.sidecars=nowhere", r"data\.sidecars: no .*nowhere"),
        ("data.sidecars=empty", r"data\.sidecars: no shard has its trees in empty .*powerclip annotate trees"),
        ("regions.kind=segments", r"no shard has its regions beside them .*powerclip annotate regions"),
        ("data.strict=true", r"sample \w+: .*(bad/unreadable_image|trees/no_sidecar)"),
        ("train.batch_size=100", r"train\.batch_size is 100, but the shards have only 17 samples"),
    ],
)
def test_what_is_wrong_is_said_in_the_recipes_words(tmp_path, shards, monkeypatch, override, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=expected):
        train(tiny(tmp_path, *settings(shards), override), tmp_path / "run", quiet=True)


def test_shards_are_counted_once_for_all_runs_that_share_a_cache(tmp_path, shards):
    said: list[str] = []
    cache = DataCache(said.append)
    recipe = tiny(tmp_path, *settings(shards))
    encoder = start(recipe).encoder
    assert make_loader(recipe, encoder, cache=cache).shards is make_loader(recipe, encoder, cache=cache).shards
    assert said == [f"{shards}/{{00000..00001}}.tar: 2 shards, 17 samples"]


def test_shards_can_be_indexed_ahead(tmp_path):
    write_samples(tmp_path / "shards", [2, 3])
    command = ["index", f"{tmp_path}/shards/*.tar", f"{tmp_path}/gone.tar", "--sidecars", f"{tmp_path}/sidecars"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "3 shards, 5 samples (1 shard missing or not to be opened)" in done.output
    assert str(tmp_path / "gone.tar") in done.output
    assert sorted(path.name for path in (tmp_path / "sidecars").iterdir()) == ["00000.tar.index", "00001.tar.index"]


def test_strict_can_be_asked_for_on_the_command_line(tmp_path, shards):
    command = ["train", "--strict", "-r", str(write_tiny(tmp_path)), "-o", str(tmp_path / "run"), *settings(shards)]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, UserError)
    assert "data.strict: false goes on" in str(done.exception)


def test_a_worker_that_is_killed_is_one_line(tmp_path, shards):
    # In a process of its own: torch raises its error wherever the main thread of a process is at that moment.
    changes = settings(shards, "data.workers=1", "train.steps=100000")
    command = ["powerclip", "train", "--recipe", str(write_tiny(tmp_path)), *changes, "-o", str(tmp_path / "run"), "-q"]
    script = f"""
import multiprocessing, os, signal, threading, time
def kill():
    while not multiprocessing.active_children():
        time.sleep(0.05)
    time.sleep(1)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
import sys
sys.argv = {command!r}
from powerclip.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("powerclip: error: a process that prepares batches has been killed")
