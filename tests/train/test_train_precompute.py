"""Precomputed tokens: what frozen blocks make of an image is computed once, and the run is the same."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tiny_run import tiny, weights

from powerclip.encoders.vision import forward_image, forward_tokens, tokens_after
from powerclip.errors import UserError
from powerclip.train.data_cache import DataCache
from powerclip.train.dry_run import dry_run
from powerclip.train.loop import train
from powerclip.train.memory import synthetic_batch
from powerclip.train.sections import ModelSection
from powerclip.train.state import start

DEEP = ["model.config.vision_cfg.layers=2", "data.crop=1", "train.steps=6"]


def corpus(mini_corpus: Path) -> list[str]:
    return ["data.source=corpus", f"data.shards={mini_corpus}/train-*.tar", f"data.trees={mini_corpus}/trees.tsv"]


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("pool", ["tok", "avg"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_tokens_of_the_first_blocks_lead_to_the_features_of_the_images(tmp_path, pool, depth):
    encoder = start(tiny(tmp_path, *DEEP, f"model.config.vision_cfg.pool_type={pool}")).encoder.eval()
    visual, images = encoder.clip.visual, torch.randn(3, 3, *encoder.image_size)
    tokens = tokens_after(visual, images, depth)
    for dense in (True, False):
        pooled, patches, _ = forward_image(visual, images, dense=dense)
        again = forward_tokens(visual, tokens, depth, dense=dense)
        torch.testing.assert_close(again, (pooled, patches))


@pytest.mark.parametrize("freeze", ["image:1", "image:2", "image"])
def test_a_run_with_precomputed_tokens_is_the_run_without(tmp_path, mini_corpus, freeze):
    recipe = [*corpus(mini_corpus), *DEEP, f"train.freeze='{freeze}'", "train.log_every=1"]
    train(tiny(tmp_path, *recipe), tmp_path / "plain", quiet=True)
    train(tiny(tmp_path, *recipe, "train.precompute=true"), tmp_path / "kept", quiet=True)
    torch.testing.assert_close(losses(tmp_path / "kept"), losses(tmp_path / "plain"), rtol=1e-4, atol=1e-5)
    plain, kept = weights(tmp_path / "plain"), weights(tmp_path / "kept")
    for name, value in plain.items():
        torch.testing.assert_close(kept[name], value, rtol=1e-3, atol=1e-4)


def test_runs_with_the_same_frozen_weights_share_their_tokens(tmp_path, mini_corpus):
    train(tiny(tmp_path, "train.steps=1"), tmp_path / "first", quiet=True)
    said: list[str] = []
    cache = DataCache(said.append)
    towers = ["model.config=null", f"model.pretrained={tmp_path}/first"]
    frozen = ["train.freeze=image:1", "train.precompute=true"]
    for name, more in (
        ("a", ["model.redraw=heads"]),
        ("b", ["model.redraw=heads", "train.seed=1", "objective=clip"]),
        ("c", ["model.redraw='image,heads'", "train.seed=1"]),
    ):
        recipe = tiny(tmp_path, *corpus(mini_corpus), *DEEP[1:], "train.steps=1", *towers, *frozen, *more)
        train(recipe, tmp_path / name, quiet=True, cache=cache)
    computed = [line for line in said if line.startswith("train.precompute")]
    assert len(computed) == 2  # b reads those of a; c has other weights
    assert "through the first 1 blocks" in computed[0]


def test_a_dry_run_measures_steps_on_tokens(tmp_path, mini_corpus):
    recipe = tiny(tmp_path, *corpus(mini_corpus), *DEEP, "train.freeze='image:1'", "train.precompute=true")
    assert synthetic_batch(recipe, start(recipe).encoder, 3).images.shape == (3, 1 + 2 * 2, 16)
    printed = io.StringIO()
    dry_run(recipe, tmp_path / "run", console=Console(file=printed, width=200))
    assert "the image tower's first 1 blocks run once for each image (precompute)" in printed.getvalue()
    assert "pairs/s" in printed.getvalue()


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["train.freeze=image:1", "data.crop=0.9"], "needs data.source: corpus, data.crop: 1"),
        (["train.freeze=text"], "set train.freeze: image:N"),
        (["train.freeze=image:1", "train.lora=2"], "does not go with"),
    ],
)
def test_recipes_that_cannot_keep_tokens_are_refused(tmp_path, mini_corpus, overrides, complaint):
    with pytest.raises(UserError, match=complaint):
        tiny(tmp_path, *corpus(mini_corpus), *DEEP, "train.precompute=true", *overrides)


@pytest.mark.parametrize("method", ["objective=flip", "alignment.mosaics=1"])
def test_methods_that_choose_patches_or_make_mosaics_are_refused(tmp_path, mini_corpus, method):
    recipe = tiny(tmp_path, *corpus(mini_corpus), *DEEP, "train.freeze=image:1", "train.precompute=true", method)
    with pytest.raises(UserError, match=r"train\.precompute keeps what frozen blocks make of whole images"):
        train(recipe, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_tower_of_timm_is_refused(tmp_path, mini_corpus):
    recipe = tiny(tmp_path, *corpus(mini_corpus), "data.crop=1", "train.freeze=image:1", "train.precompute=true")
    assert recipe.model.config is not None
    towers = recipe.model.config | {"vision_cfg": {"timm_model_name": "test_vit3", "image_size": 160}}
    with pytest.raises(UserError, match="this one is timm's"):
        start(replace(recipe, model=ModelSection(config=towers)))
