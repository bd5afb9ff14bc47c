"""How the towers run: settings that follow the device, and one compilation for all runs of a process."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny
from torch._dynamo.testing import CompileCounter

from powerclip.objectives import encode
from powerclip.train.data import make_loader
from powerclip.train.recipe import TrainSection
from powerclip.train.state import start
from powerclip.train.towers import compiled_encode, in_bf16, is_compiled, run_towers

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_by_default_a_gpu_gets_bf16_and_a_compiler_and_a_cpu_neither():
    settings = TrainSection()
    assert (in_bf16(settings, GPU), is_compiled(settings, GPU)) == (True, True)
    assert (in_bf16(settings, CPU), is_compiled(settings, CPU)) == (False, False)


def test_what_a_recipe_says_holds_on_any_device():
    for device in (CPU, GPU):
        assert in_bf16(TrainSection(precision="bf16"), device)
        assert not in_bf16(TrainSection(precision="float32"), device)
        assert is_compiled(TrainSection(compile="always"), device)
        assert not is_compiled(TrainSection(compile="never"), device)


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_features_come_in_the_precision_of_the_recipe(tmp_path, precision, dtype):
    recipe = tiny(tmp_path, f"train.precision={precision}")
    state = start(recipe)
    batch = make_loader(recipe, state.encoder).batch(0)
    found = run_towers(recipe.train, state.objective, state.encoder, batch.images, batch.tokens)
    assert found.patches.dtype == dtype


def test_towers_are_compiled_once_for_all_runs_of_one_structure(tmp_path):
    counter = CompileCounter()
    compiled = compiled_encode(counter)
    for seed in range(3):
        recipe = tiny(tmp_path, f"train.seed={seed}")
        state = start(recipe)
        batch = make_loader(recipe, state.encoder, compiled=True).batch(0)
        tokens = torch.nn.functional.pad(batch.tokens, (0, 40 - batch.tokens.shape[1]))
        found = compiled(state.objective, state.encoder, batch.images, tokens)
        expected = encode(state.objective, state.encoder, batch.images, tokens)
        assert torch.allclose(found.image, expected.image, atol=1e-5)
        found.patches.sum().backward()
        if seed == 0:
            first = counter.frame_count
    assert first > 0
    assert counter.frame_count == first


def test_a_new_caption_length_compiles_the_text_tower_alone(tmp_path):
    counter = CompileCounter()
    compiled = compiled_encode(counter)
    recipe = tiny(tmp_path)
    state = start(recipe)
    batch = make_loader(recipe, state.encoder, compiled=True).batch(0)
    whole = torch.nn.functional.pad(batch.tokens, (0, 40 - batch.tokens.shape[1]))
    half = len(whole) // 2
    expected = encode(state.objective, state.encoder, batch.images, whole)
    counts = []
    for tokens in (whole, (whole[:half, :32], whole[half:])):
        found = compiled(state.objective, state.encoder, batch.images, tokens)
        assert torch.allclose(found.image, expected.image, atol=1e-5)
        assert torch.allclose(found.text, expected.text, atol=1e-5)
        counts.append(counter.frame_count)
    assert counts == [2, 4]  # both towers, then the text tower for two shapes of captions
