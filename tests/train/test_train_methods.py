"""The methods of the paper's tables in one trainer: each learns, continues, compiles and takes settings."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_run import same_weights, tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from powerclip.data.batch import Batch
from powerclip.encoders import DualEncoder, Features
from powerclip.errors import UserError
from powerclip.objectives import SETTINGS, Objective, Plan
from powerclip.train.data import make_loader
from powerclip.train.loop import train, train_step
from powerclip.train.metrics import read_metrics
from powerclip.train.recipe import dump, parse_recipe
from powerclip.train.state import TrainState, start

BASELINES = sorted(SETTINGS)
# A grid of 4 × 4, so that there is something to choose from.
TOWERS = ["model.config.vision_cfg.image_size=32", "model.config.vision_cfg.width=32", "model.config.text_cfg.width=16"]


def recipe_of(tmp_path, name: str, *overrides: str):
    heads = ["objective_settings.hidden=32", "objective_settings.output=16"] if name == "a_clip" else []
    return tiny(tmp_path, f"objective={name}", *TOWERS, *heads, *overrides)


def stop_at_7(state: TrainState) -> None:
    if state.step == 7:
        raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", BASELINES)
def test_every_method_learns_from_scenes_in_50_steps(tmp_path, name):
    recipe = recipe_of(
        tmp_path, name, "train.steps=50", "train.batch_size=16", "optim.lr=3e-3", "train.checkpoint_every=0"
    )
    rows = list(read_metrics(train(recipe, tmp_path / "run", quiet=True).folder.metrics))
    parts = {"a_clip": ("loss", "simclr"), "filip": ("loss", "local"), "sparc": ("loss", "local")}
    for part in ("clip", *parts.get(name, ("loss",))):
        before, after = (sum(row[part] for row in some) / 5 for some in (rows[:5], rows[-5:]))
        assert after < 0.97 * before, part


# One that changes its phase, one with a state of its own, one that draws at random; the rest are like these.
@pytest.mark.parametrize("name", ["flip", "a_clip", "clip_pgs"])
def test_a_method_continues_bit_equal(tmp_path, name):
    # FLIP's tuning begins after the stop.
    tuning = ["objective_settings.tuning=0.25"] if name == "flip" else []
    recipe = recipe_of(tmp_path, name, "train.checkpoint_every=2", *tuning)
    train(recipe, tmp_path / "whole", quiet=True)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "parts", quiet=True, on_step=stop_at_7)
    train(recipe, tmp_path / "parts", quiet=True, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


def test_what_the_alignment_learns_and_where_it_stands_continue_bit_equal(tmp_path):
    settings = ("projection=separate", "ramp=1.0", "negatives=k", "anneal=true")
    recipe = recipe_of(tmp_path, "powerclip", "train.checkpoint_every=2", *(f"alignment.{text}" for text in settings))
    whole = train(recipe, tmp_path / "whole", quiet=True)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path / "parts", quiet=True, on_step=stop_at_7)
    parts = train(recipe, tmp_path / "parts", quiet=True, resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    one, other = (list(read_metrics(run.folder.metrics))[-1] for run in (whole, parts))
    assert all(one[name] == other[name] for name in ("loss", "alignment", "weight", "k"))


def test_a_clips_teacher_continues_bit_equal(tmp_path):
    recipe = recipe_of(tmp_path, "a_clip")
    loader = make_loader(recipe, start(recipe).encoder)
    states = [start(recipe) for _ in range(2)]
    whole, part = states
    for step in range(6):
        train_step(whole, loader.batch(step), recipe)
        if step == 2:
            part.restore({"step": 3, **copy.deepcopy(whole.snapshot())})  # tensors are shared otherwise
            generator = torch.get_rng_state()
    torch.set_rng_state(generator)
    for step in range(3, 6):
        train_step(part, loader.batch(step), recipe)
    one, other = (state.objective.state_dict() for state in states)
    assert one.keys() == other.keys()
    assert "teacher.proj" in one
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["teacher.proj"], whole.encoder.clip.visual.proj)


def features_of(objective: Objective, encoder: DualEncoder, batch: Batch, noise: Tensor | None) -> Features:
    """Everything that `Towers` runs for a batch, as one function."""
    plan = Plan() if noise is None else objective.plan(encoder, batch.images, noise)
    return encoder.join_features(
        objective.encode_images(encoder, batch.images, plan), *encoder.encode_words(batch.tokens, dense=objective.dense)
    )


@pytest.mark.parametrize("name", BASELINES)
def test_every_method_compiles_as_one_graph_and_once_for_the_whole_run(tmp_path, name):
    recipe = recipe_of(tmp_path, name)
    state = start(recipe)
    batch = make_loader(recipe, state.encoder).batch(0)
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    compiled = torch.compile(features_of, backend=counter, fullgraph=True, dynamic=False)
    for step in (0, 3, 7):
        state.objective.progress(step, 10)
        torch.manual_seed(step)
        shape = state.objective.noise_shape(state.encoder)
        noise = None if shape is None else torch.rand(len(batch), *shape)
        found = compiled(state.objective, state.encoder, batch, noise)
        expected = features_of(state.objective, state.encoder, batch, noise)
        torch.testing.assert_close(found.image, expected.image, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", BASELINES)
def test_every_method_takes_a_step_with_towers_in_bf16(tmp_path, name):
    recipe = recipe_of(tmp_path, name, "train.precision=bf16", "train.batch_size=8")
    exact = recipe_of(tmp_path, name, "train.batch_size=8")
    totals = []
    for version in (recipe, exact):
        state = start(version)
        torch.manual_seed(1)
        _, terms, norm = train_step(state, make_loader(version, state.encoder).batch(0), version)
        assert norm.isfinite()
        assert norm > 0
        assert terms.total.dtype == torch.float32
        totals.append(terms.total.item())
    assert totals[0] == pytest.approx(totals[1], rel=0.1)


def test_flips_learning_rate_falls_to_zero_before_its_tuning_begins(tmp_path):
    settings = ["objective_settings.tuning=0.5", "objective_settings.tuning_rate=0.1"]
    recipe = recipe_of(tmp_path, "flip", *settings, "optim.lr=1", "optim.warmup=2", "train.steps=20")
    state = start(recipe)
    batch = make_loader(recipe, state.encoder).batch(0)
    rates = [train_step(state, batch, recipe)[0] for _ in range(20)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[9] < 0.1
    assert rates[10] == pytest.approx(0.1)
    assert rates[19] < 0.01


def test_a_recipe_holds_all_settings_of_its_objective(tmp_path):
    recipe = recipe_of(tmp_path, "clip_pgs", "objective_settings.least=0.5")
    assert recipe.objective_settings["least"] == 0.5
    assert recipe.objective_settings["iterations"] == 50
    assert parse_recipe(dump(recipe), "dump") == recipe
    assert tiny(tmp_path, "objective=clip").objective_settings == {}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["objective=flip", "objective_settings.kep=1"], ["objective_settings.kep", "did you mean 'keep'"]),
        (["objective=flip", "objective_settings.keep=yes"], ["objective_settings.keep", "must be a number"]),
        (["objective=flip", "objective_settings.keep=0"], ["objective_settings.keep", "(0, 1]"]),
        (["objective=e_clip", "objective_settings.least=1.5"], ["objective_settings.least", "[0, 1]"]),
        (["objective=clip_pgs", "objective_settings.epsilon=0"], ["objective_settings.epsilon", "positive"]),
        (["objective=e_clip", "objective_settings.threshold=.nan"], ["objective_settings.threshold", "finite", "nan"]),
        (["objective=e_clip", "objective_settings.threshold=.inf"], ["objective_settings.threshold", "finite", "inf"]),
        (["objective=clip_pgs", "objective_settings.threshold=.nan"], ["objective_settings.threshold", "finite"]),
        (["objective=clip_pgs", "objective_settings.epsilon=.inf"], ["objective_settings.epsilon", "finite"]),
        (["objective=sparc", "objective_settings.local_weight=.inf"], ["objective_settings.local_weight", "finite"]),
        (["objective=a_clip", "objective_settings.hidden=0"], ["objective_settings.hidden", "at least 1"]),
        (["objective=clip", "objective_settings.keep=0.5"], ["objective clip has no objective_settings.keep"]),
        (["objective=powerclip", "objective_settings.weight=1"], ["has no objective_settings.weight", "'alignment'"]),
        (["objective=falip"], ["did you mean"]),
    ],
)
def test_a_setting_that_cannot_be_is_answered_by_name(tmp_path, overrides, expected):
    with pytest.raises(UserError) as caught:
        tiny(tmp_path, *overrides)
    assert all(part in str(caught.value) for part in expected), str(caught.value)
    assert "\n" not in str(caught.value)
