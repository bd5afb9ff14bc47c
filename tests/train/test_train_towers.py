"""How the towers run: settings that follow the device, and one compilation for all runs of a process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from tiny_run import tiny
from torch._dynamo.testing import CompileCounter

from powerclip.errors import UserError
from powerclip.runtime.compile import compile_shapes
from powerclip.runtime.distributed import SINGLE, Ranks
from powerclip.train import loop as training
from powerclip.train import towers
from powerclip.train.data import make_loader
from powerclip.train.loop import train
from powerclip.train.metrics import read_metrics
from powerclip.train.sections import TrainSection
from powerclip.train.state import start
from powerclip.train.towers import Towers, compiled, in_bf16, is_compiled, make_towers

# Widths that float8 takes.
FITTING = [f"model.config.{part}_cfg.width=32" for part in ("vision", "text")] + [
    "model.config.vision_cfg.head_width=16"
]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_by_default_a_gpu_gets_bf16_and_a_compiler_and_a_cpu_neither():
    settings = TrainSection()
    assert (in_bf16(settings, GPU), is_compiled(settings, GPU)) == (True, True)
    assert (in_bf16(settings, CPU), is_compiled(settings, CPU)) == (False, False)


def test_what_a_recipe_says_holds_on_any_device():
    for device in (CPU, GPU):
        assert in_bf16(TrainSection(precision="bf16"), device)
        assert in_bf16(TrainSection(precision="fp8"), device)
        assert not in_bf16(TrainSection(precision="float32"), device)
        assert is_compiled(TrainSection(compile="always"), device)
        assert not is_compiled(TrainSection(compile="never"), device)


@pytest.mark.parametrize(
    ("settings", "device", "ranks", "mode"),
    [
        ({}, GPU, SINGLE, "graphs"),
        ({}, CPU, SINGLE, "none"),
        ({}, GPU, Ranks(0, 2), "towers"),
        ({"accumulate": 2}, GPU, SINGLE, "towers"),
        ({"compile": "always"}, GPU, SINGLE, "towers"),
        ({"compile": "always"}, CPU, SINGLE, "towers"),
        ({"compile": "blocks"}, GPU, SINGLE, "blocks"),
        ({"sharding": "full"}, GPU, SINGLE, "graphs"),
        ({"sharding": "full"}, GPU, Ranks(0, 2), "blocks"),
        ({"sharding": "full", "compile": "never"}, GPU, Ranks(0, 2), "none"),
    ],
)
def test_graphs_are_for_one_rank_that_takes_a_batch_at_once(tmp_path, settings, device, ranks, mode):
    state = start(tiny(tmp_path))
    towers = make_towers(TrainSection(**settings), state.objective, state.encoder, device, ranks)
    assert towers.compile_mode == mode


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_features_come_in_the_precision_of_the_recipe(tmp_path, precision, dtype):
    recipe = tiny(tmp_path, f"train.precision={precision}")
    state = start(recipe)
    batch = make_loader(recipe, state.encoder).batch(0)
    assert state.towers(batch.images, batch.tokens).patches.dtype == dtype


def test_float8_is_refused_where_it_cannot_run(tmp_path):
    with pytest.raises(UserError, match=r"train.precision: fp8 needs an NVIDIA GPU, and this runs on cpu"):
        start(tiny(tmp_path, "train.precision=fp8", "train.device=cpu"))
    with pytest.raises(UserError, match=r"train.precision: fp8 does not go with train.lora"):
        tiny(tmp_path, "train.precision=fp8", "train.lora=4")


@pytest.mark.gpu
def test_a_run_in_float8_learns_as_one_in_bf16(tmp_path):
    losses = {}
    for precision in ("bf16", "fp8"):
        recipe = tiny(tmp_path, "train.device=cuda", f"train.precision={precision}", "train.steps=30", *FITTING)
        train(recipe, tmp_path / precision, quiet=True)
        losses[precision] = read_metrics(tmp_path / precision / "metrics.jsonl")[-1]["loss"]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.1)
    assert losses["fp8"] != losses["bf16"]


@pytest.fixture
def counter(monkeypatch) -> Iterator[CompileCounter]:
    """Counts what compiled towers compile, in place of a compiler."""
    counter = CompileCounter()
    monkeypatch.setattr(towers, "compile_shapes", partial(compile_shapes, backend=counter))
    torch._dynamo.reset()
    compiled.cache_clear()
    yield counter
    compiled.cache_clear()


def test_towers_are_compiled_once_for_all_runs_of_one_structure(tmp_path, counter):
    for seed in range(3):
        recipe = tiny(tmp_path, f"train.seed={seed}")
        state = start(recipe)
        batch = make_loader(recipe, state.encoder, compiled=True).batch(0)
        tokens = torch.nn.functional.pad(batch.tokens, (0, 40 - batch.tokens.shape[1]))
        found = Towers(state.objective, state.encoder, compile="towers")(batch.images, tokens)
        expected = Towers(state.objective, state.encoder)(batch.images, tokens)
        assert torch.allclose(found.image, expected.image, atol=1e-5)
        found.patches.sum().backward()
        if seed == 0:
            first = counter.frame_count
    assert first > 0
    assert counter.frame_count == first


def test_a_new_caption_length_compiles_the_text_tower_alone(tmp_path, counter):
    recipe = tiny(tmp_path)
    state = start(recipe)
    batch = make_loader(recipe, state.encoder, compiled=True).batch(0)
    whole = torch.nn.functional.pad(batch.tokens, (0, 40 - batch.tokens.shape[1]))
    half = len(whole) // 2
    expected = Towers(state.objective, state.encoder)(batch.images, whole)
    counts = []
    for tokens in (whole, (whole[:half, :32], whole[half:])):
        found = Towers(state.objective, state.encoder, compile="towers")(batch.images, tokens)
        assert torch.allclose(found.image, expected.image, atol=1e-5)
        assert torch.allclose(found.text, expected.text, atol=1e-5)
        counts.append(counter.frame_count)
    assert counts == [2, 4]  # both towers, then the text tower for two shapes of captions


def test_patches_that_no_gradient_needs_are_freed_before_the_backward_pass(tmp_path, monkeypatch):
    recipe = tiny(tmp_path)
    state = start(recipe)
    patches: list[weakref.ref[torch.Tensor]] = []
    compute_loss, alive = state.objective.loss, []

    def loss(features, batch, ranks):
        patches.append(weakref.ref(features.patches))
        return compute_loss(features, batch, ranks)

    def mark(total):
        alive.append(patches[0]() is not None)
        return total

    monkeypatch.setattr(state.objective, "loss", loss)
    monkeypatch.setattr(training, "mark_loss", mark)
    training.backward(state, make_loader(recipe, state.encoder).batch(0), recipe)
    assert alive == [False]
