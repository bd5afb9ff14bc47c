"""Training on a corpus with stored masks: from superpixels to a model; read once, and only where they are looked at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_run import same_weights, tiny, write_tiny
from typer.testing import CliRunner

from powerclip.annotate.region_annotator import RegionAnnotator
from powerclip.annotate.segmenters.superpixels import Superpixels
from powerclip.cli import app
from powerclip.errors import UserError
from powerclip.train.data import make_loader
from powerclip.train.data_cache import DataCache
from powerclip.train.loop import train
from powerclip.train.state import start

sys.path.append(str(Path(__file__).parents[1] / "annotate"))
from annotate_examples import make_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Two shards of images with discs, and their superpixels in `sidecars`."""
    folder = tmp_path_factory.mktemp("photos")
    for shard in make_shards(folder, 2, samples=6):
        RegionAnnotator(Superpixels(most=6), folder / "sidecars").annotate(shard)
    return folder


def settings(folder: Path, *more: str) -> list[str]:
    base = ["data.source=corpus", f"data.shards={folder}/*.tar", f"data.sidecars={folder}/sidecars"]
    return [*base, "data.trees=flat", "regions.kind=segments", "train.steps=3", *more]


def test_a_corpus_with_masks_trains_on_them(tmp_path, shards, capsys):
    train(tiny(tmp_path, *settings(shards)), tmp_path / "masks")
    printed = capsys.readouterr().out.replace("\n", " ")
    assert f"{shards}/sidecars: " in printed
    assert " masks of 12 images" in printed
    train(tiny(tmp_path, *settings(shards)), tmp_path / "again", quiet=True)
    train(tiny(tmp_path, *settings(shards, "regions.kind=random")), tmp_path / "boxes", quiet=True)
    assert same_weights(tmp_path / "masks", tmp_path / "again")
    assert not same_weights(tmp_path / "masks", tmp_path / "boxes")


def test_only_powerclip_reads_masks(tmp_path, shards):
    found = {}
    for objective in ("clip", "powerclip"):
        recipe = tiny(tmp_path, *settings(shards), f"objective={objective}")
        found[objective] = make_loader(recipe, start(recipe).encoder)
    assert found["clip"].masks is None
    assert found["powerclip"].masks.counts.min() > 0
    missing = tiny(tmp_path, *settings(shards), "objective=clip", "data.sidecars=nowhere")
    train(missing, tmp_path / "run", quiet=True)


def test_masks_are_read_once_for_all_runs_that_share_a_cache(tmp_path, shards):
    said: list[str] = []
    cache = DataCache(said.append)
    recipes = [tiny(tmp_path, *settings(shards, f"regions.count={count}")) for count in (2, 3)]
    loaders = [make_loader(recipe, start(recipe).encoder, cache=cache) for recipe in recipes]
    assert loaders[0].masks.bits is loaders[1].masks.bits
    plain = make_loader(
        tiny(tmp_path, *settings(shards, "regions.kind=random")), start(recipes[0]).encoder, cache=cache
    )
    assert plain.masks is None
    assert plain.corpus is loaders[0].corpus
    assert len(said) == 2  # the corpus and its masks
    assert torch.equal(plain.batch(0).images, loaders[1].batch(0).images)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.sidecars=nowhere", r"data\.sidecars: no folder nowhere"),
        ("data.sidecars=empty", r"data\.sidecars: no shard has its regions in empty .*powerclip annotate regions"),
        ("data.sidecars=null", r"data\.sidecars: no shard has its regions beside them .*powerclip annotate regions"),
        ("data.sidecars=torn", r"sidecar torn/000\.regions\.parquet cannot be read: .*annotate its shard again"),
        ("data.trees=null data.source=scenes", r"regions\.kind: segments needs masks in sidecars, and data\.source"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(tmp_path, shards, monkeypatch, override, expected):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "torn"):
        (tmp_path / name).mkdir()
    whole = (shards / "sidecars" / "000.regions.parquet").read_bytes()
    (tmp_path / "torn" / "000.regions.parquet").write_bytes(whole[:-30])
    with pytest.raises(UserError, match=expected):
        train(tiny(tmp_path, *settings(shards), *override.split()), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_names_the_sidecars(tmp_path, shards):
    command = ["train", "--dry-run", "-r", str(write_tiny(tmp_path)), "-o", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*command, *settings(shards)])
    assert done.exit_code == 0, done.output
    assert f"data.sidecars: {shards}/sidecars" in done.output
    gone = CliRunner().invoke(app, [*command, *settings(shards, "data.sidecars=nowhere")])
    assert "data.sidecars: MISSING: no folder nowhere" in gone.output
