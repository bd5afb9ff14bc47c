"""One way to name a model: names, folders, runs, checkpoints; and one line when there is none."""

import logging
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tiny_run import tiny
from tiny_towers import tiny_config

from powerclip.encoders import DualEncoder, build, load, save
from powerclip.encoders.resolve import resolve
from powerclip.errors import UserError
from powerclip.runtime.checkpoint_file import checkpoints
from powerclip.runtime.distributed import SINGLE
from powerclip.train import checkpoint, sharded_checkpoint
from powerclip.train.loop import train
from powerclip.train.recipe import Recipe
from powerclip.train.state import start


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    """A run that ended early, after its checkpoints of steps 2 and 4; and the weights that it had there."""
    folder, weights = tmp_path_factory.mktemp("stopped"), {}

    def on_step(state) -> None:
        weights[state.step] = {name: value.detach().clone() for name, value in state.encoder.clip.state_dict().items()}
        if state.step == 5:
            raise Stop

    with pytest.raises(Stop):
        train(tiny(folder, "train.checkpoint_every=2", "train.keep=3"), folder / "run", quiet=True, on_step=on_step)
    return folder / "run", weights


@pytest.fixture
def run(stopped_run, tmp_path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(stopped_run[0], tmp_path / "run")


def same(model, weights) -> bool:
    state = model.clip.state_dict()
    return state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in state)


def test_a_stopped_run_is_the_model_of_its_newest_checkpoint_and_says_so(stopped_run, caplog):
    run, weights = stopped_run
    model, preprocess, tokenizer = load(run)
    assert same(model, weights[4])
    assert tokenizer.context_length == 40
    assert callable(preprocess)
    assert "no final model, its weights are those of step-000004.pt" in caplog.text
    assert same(load(run / "checkpoints")[0], weights[4])


def test_one_checkpoint_is_a_model_even_when_it_lies_elsewhere(stopped_run, tmp_path):
    run, weights = stopped_run
    moved = shutil.copy(run / "checkpoints" / "step-000002.pt", tmp_path / "best.pt")
    assert same(load(run / "checkpoints" / "step-000002.pt")[0], weights[2])
    assert same(load(moved)[0], weights[2])


def test_a_damaged_checkpoint_is_passed_over_and_left_alone(run, stopped_run, caplog):
    newest = checkpoints(run / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:5000])
    assert same(load(run)[0], stopped_run[1][2])
    assert "step-000004.pt: torn or not a checkpoint at all; taking step-000002.pt" in caplog.text
    assert newest.is_file()
    checkpoints(run / "checkpoints")[0].write_bytes(b"")
    with pytest.raises(UserError, match=r"torn.*and 1 older, bad as well\); no good checkpoint is left"):
        load(run)


def test_a_finished_run_is_its_final_model(run, tmp_path):
    final = build(config=tiny_config())
    save(final, run / "model")
    assert same(load(run)[0], final.clip.state_dict())


def test_the_checkpoint_keeps_the_preprocessing(run):
    path = checkpoints(run / "checkpoints")[-1]
    state = checkpoint.read(path)
    state["model"]["preprocess"]["resize_mode"] = "squash"
    checkpoint.write(path.parent, 9, {name: value for name, value in state.items() if name != "step"}, keep=9)
    assert load(run)[0].preprocess["resize_mode"] == "squash"


def test_a_checkpoint_of_an_earlier_version_is_explained(run):
    state = checkpoint.read(checkpoints(run / "checkpoints")[-1])
    del state["model"]
    checkpoint.write(run / "checkpoints", 9, state | {"step": 9}, keep=9)
    with pytest.raises(UserError, match=r"earlier version of powerclip.*--resume"):
        load(run)


def test_what_is_no_model_is_explained_by_what_was_looked_for(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no model here; looked for open_clip_config.json.*checkpoints/step-\*"):
        load(tmp_path / "empty")
    (tmp_path / "empty" / "recipe.yaml").write_text("")
    with pytest.raises(UserError, match="a run without a model yet"):
        load(tmp_path / "empty")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights.pt")
    with pytest.raises(UserError, match="does not say which towers they belong to"):
        load(tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"a model without weights; add a tag, ViT-B-16/TAG .*laion2b_s34b_b88k"):
        build(pretrained="ViT-B-16")


def encoder_of(recipe: Recipe) -> DualEncoder:
    model = recipe.model
    return build(model.name, model.config, model.pretrained)


def test_training_starts_from_a_folder_a_run_or_a_checkpoint(stopped_run, tmp_path):
    run, weights = stopped_run
    first = run / "checkpoints" / "step-000002.pt"
    for settings in (
        ["model.config=null", f"model.pretrained={run}"],
        ["model.config=null", f"model.name={run}"],
        [f"model.pretrained={run}"],  # the recipe's towers are those of the run
    ):
        assert same(encoder_of(tiny(tmp_path, *settings)), weights[4])
    started = []
    recipe = tiny(tmp_path, "model.config=null", f"model.pretrained={first}", "train.steps=1", "optim.lr=0")
    train(recipe, tmp_path / "next", quiet=True, on_step=lambda state: started.append(state.encoder))
    assert same(started[0], weights[2])
    assert same(load(tmp_path / "next")[0], weights[2])


def test_weights_for_other_towers_are_refused_with_the_first_difference(stopped_run, tmp_path):
    recipe = tiny(tmp_path, f"model.pretrained={stopped_run[0]}", "model.config.text_cfg.layers=2")
    with pytest.raises(UserError, match=r"text_cfg.layers is 1 there and 2 here; leave out the name or config \(null"):
        encoder_of(recipe)


def test_towers_written_differently_are_the_same_towers(tmp_path):
    config = tiny_config()
    config["vision_cfg"]["image_size"] = 32
    model = build(config=config)
    save(model, tmp_path / "model")
    config["vision_cfg"]["image_size"] = [32, 32]
    config["vision_cfg"]["mlp_ratio"] = 4.0
    assert same(build(config=config, pretrained=str(tmp_path / "model")), model.clip.state_dict())


def test_resolving_reads_no_weights(tmp_path, caplog):
    save(build(config=tiny_config()), tmp_path / "model")
    (tmp_path / "model" / "open_clip_model.safetensors").write_bytes(b"damaged")
    with caplog.at_level(logging.WARNING):
        assert resolve(str(tmp_path / "model")).config == tiny_config()
    with pytest.raises(UserError, match="not a readable weights file"):
        build(str(tmp_path / "model"))


def test_a_checkpoint_that_was_written_in_parts_is_a_model_too(stopped_run, tmp_path):
    state = start(tiny(tmp_path))
    state.step = 7
    folder = tmp_path / "run" / "checkpoints"
    path = sharded_checkpoint.write(folder, state, {"guard": {}}, 2, SINGLE)
    expected = state.encoder.clip.state_dict()
    assert same(load(path)[0], expected)
    shutil.copy(stopped_run[0] / "checkpoints" / "step-000004.pt", folder)
    assert same(load(tmp_path / "run")[0], expected)  # step 7 is newer than the file of step 4
    (part,) = path.glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-9])
    assert same(load(tmp_path / "run")[0], stopped_run[1][4])


def test_a_list_of_parts_that_names_code_is_not_read(tmp_path):
    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harm",))

    state = start(tiny(tmp_path))
    path = sharded_checkpoint.write(tmp_path / "run" / "checkpoints", state, {"guard": {}}, 2, SINGLE)
    size = (path / ".metadata").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(Harm()).ljust(size, b" "))
    with pytest.raises(UserError, match="cannot be read as a sharded checkpoint"):
        load(path)
    assert not (tmp_path / "harm").exists()
