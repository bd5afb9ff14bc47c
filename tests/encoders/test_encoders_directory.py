"""Saved models go to open_clip and back without a bit of difference."""

import json
import os
import stat
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from open_clip.push_to_hf_hub import save_config_for_hf
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_towers import tiny_config

import powerclip
from powerclip.encoders import DualEncoder, build, load, save
from powerclip.errors import UserError

VARIANTS = ["clip", "custom-text", "clipa", "class-token", "linear-projection", "sigmoid"]


def encoder(variant: str = "clip", seed: int = 0) -> DualEncoder:
    torch.manual_seed(seed)
    return build(config=tiny_config(variant)).eval()


def open_clip_saves(directory: Path, weights: str = "open_clip_model.safetensors"):
    """A model that open_clip made and wrote, without any of our code."""
    directory.mkdir()
    config = tiny_config("custom-text")
    (directory / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    torch.manual_seed(3)
    clip, _, _ = open_clip.create_model_and_transforms(f"local-dir:{directory}", image_mean=(0.5, 0.5, 0.5))
    save_config_for_hf(clip, directory / "open_clip_config.json", model_config=config)
    if weights.endswith(".safetensors"):
        save_file(clip.state_dict(), directory / weights)
    else:
        torch.save(clip.state_dict(), directory / weights)
    return clip.eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_open_clip_reads_what_we_save_bit_for_bit(variant, tmp_path, images, tokens):
    model = encoder(variant)
    save(model, tmp_path / "model")
    theirs, _, _ = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'model'}")
    theirs.eval()
    assert type(theirs) is type(model.clip)
    assert torch.equal(theirs.encode_image(images, normalize=True), model.encode_image(images))
    assert torch.equal(theirs.encode_text(tokens, normalize=True), model.encode_text(tokens))


def test_weights_of_16_bits_become_32(tmp_path):
    model = encoder()
    rounded = {name: value.half().float() for name, value in model.clip.state_dict().items()}
    model.clip.half()
    loaded, _, _ = load(save(model, tmp_path / "model"))
    state = loaded.clip.state_dict()
    assert all(value.dtype == torch.float32 and torch.equal(value, rounded[name]) for name, value in state.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_we_read_what_we_save_bit_for_bit(variant, tmp_path, images, tokens):
    model = encoder(variant)
    loaded, _, _ = load(save(model, tmp_path / "model"))
    assert loaded.config == model.config
    assert not loaded.training
    before, after = model(images, tokens), loaded(images, tokens)
    assert torch.equal(before.patches, after.patches)
    assert torch.equal(before.words, after.words)
    assert torch.equal(before.logit_scale, after.logit_scale)


@pytest.mark.parametrize(
    "weights", ["open_clip_model.safetensors", "open_clip_pytorch_model.bin", "model.pt", "epoch_1.pt"]
)
def test_we_read_what_open_clip_saves(weights, tmp_path, images, tokens):
    theirs = open_clip_saves(tmp_path / "model", weights)
    model, _, _ = load(tmp_path / "model")
    assert torch.equal(model.encode_image(images), theirs.encode_image(images, normalize=True))
    assert torch.equal(model.encode_text(tokens), theirs.encode_text(tokens, normalize=True))


def test_a_training_checkpoint_of_open_clip_is_read_through_its_wrapping(tmp_path, images):
    theirs = open_clip_saves(tmp_path / "model")
    (tmp_path / "model" / "open_clip_model.safetensors").unlink()
    wrapped = {"epoch": 1, "state_dict": {f"module.{name}": value for name, value in theirs.state_dict().items()}}
    torch.save(wrapped, tmp_path / "model" / "epoch_1.pt")
    model, _, _ = load(tmp_path / "model")
    assert torch.equal(model.encode_image(images), theirs.encode_image(images, normalize=True))


def test_preprocessing_survives_the_round_trip(tmp_path):
    open_clip_saves(tmp_path / "theirs")
    model, preprocess, _ = load(tmp_path / "theirs")
    save(model, tmp_path / "ours")
    _, _, theirs = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'ours'}")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))
    assert preprocess(image).shape == (3, 32, 48)
    assert torch.equal(preprocess(image), theirs(image))
    assert list(model.clip.visual.preprocess_cfg["mean"]) == [0.5, 0.5, 0.5]


def test_the_tokenizer_comes_back_with_the_context_length(tmp_path):
    _, _, ours = load(save(encoder(), tmp_path / "model"))
    theirs = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'model'}")
    assert theirs.context_length == ours.context_length == 16
    assert torch.equal(ours(["a dog on a red chair"]), theirs(["a dog on a red chair"]))


def test_load_and_save_are_at_the_top_of_the_package(tmp_path):
    powerclip.save(encoder(), tmp_path / "model")
    model, _, _ = powerclip.load(f"local-dir:{tmp_path / 'model'}")
    assert model.embed_dim == 24


def test_saving_again_replaces_the_model_and_keeps_the_neighbours(tmp_path, images):
    save(encoder(seed=0), tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    second = encoder(seed=1)
    save(second, tmp_path / "model")
    loaded, _, _ = load(tmp_path / "model")
    assert torch.equal(loaded.encode_image(images), second.encode_image(images))
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_save_that_fails_leaves_things_as_they_were(existing, tmp_path, monkeypatch, images):
    first = encoder(seed=0)
    if existing:
        save(first, tmp_path / "model")

    def disk_full(tensors, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("powerclip.encoders.directory.safetensors.torch.save_file", disk_full)
    with pytest.raises(UserError, match=r"could not save the model: .*No space left"):
        save(encoder(seed=1), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if existing else [])
    if existing:
        assert torch.equal(load(tmp_path / "model")[0].encode_image(images), first.encode_image(images))


def test_saving_onto_a_file_is_refused(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(UserError, match="it is a file"):
        save(encoder(), tmp_path / "model")


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_saved_files_can_be_read_by_whoever_the_umask_allows(tmp_path):
    save(encoder(), tmp_path / "model")
    (tmp_path / "plain").write_text("")
    expected = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()} == {expected}


PREPROCESSING = {
    "a list": [1],
    "two means": {"mean": [0.5, 0.5]},
    "no spread": {"std": [0, 1, 1]},
    "cubic": {"interpolation": "cubic"},
}


def damage(directory: Path, how: str) -> None:
    config, weights = directory / "open_clip_config.json", directory / "open_clip_model.safetensors"
    content = json.loads(config.read_text())
    if how == "no config":
        config.unlink()
    elif how == "no weights":
        weights.unlink()
    elif how == "two weights":
        weights.rename(directory / "a.pt")
        (directory / "b.pt").write_bytes(b"")
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "pickle":
        weights.unlink()
        (directory / "model.pt").write_bytes(b"not a pickle")
    elif how == "a tensor":
        weights.unlink()
        torch.save({"epoch": 3, "optimizer": {}}, directory / "model.pt")
    elif how == "not json":
        config.write_text("{")
    elif how == "no model_cfg":
        config.write_text("{}")
    elif how == "wider":
        content["model_cfg"]["embed_dim"] = 32
    elif how == "longer":
        content["model_cfg"]["text_cfg"]["context_length"] = 20
    elif how == "another layout":
        content["model_cfg"]["vision_cfg"]["layers"] = 3
    elif how in PREPROCESSING:
        content["preprocess_cfg"] = PREPROCESSING[how]
    elif how == "tokenizer":
        content["model_cfg"]["text_cfg"]["tokenizer_kwargs"] = {"lowercase": True}
    elif how == "fewer":
        tensors = load_file(weights)
        save_file({name: value for name, value in tensors.items() if name != "visual.proj"}, weights)
    if how in ("wider", "longer", "another layout", "tokenizer", *PREPROCESSING):
        config.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no config", "no model here; looked for open_clip_config.json"),
        ("no weights", "no weights beside the config, expected open_clip_model.safetensors"),
        ("two weights", r"several files could be the weights \(a.pt, b.pt\)"),
        ("cut", "open_clip_model.safetensors: not a readable weights file"),
        ("empty", "open_clip_model.safetensors: not a readable weights file"),
        ("pickle", "model.pt: not a readable weights file"),
        ("a tensor", "model.pt: holds something else than a model's weights"),
        ("not json", "open_clip_config.json: not a readable model config"),
        ("no model_cfg", "open_clip_config.json: a saved model's config needs 'model_cfg'"),
        ("wider", r"of another shape \(first .*24\] in the file, .*32\] by the config"),
        ("longer", r"positional_embedding: \[16, 40\] in the file, \[20, 40\] by the config"),
        ("another layout", r"12 missing \(first visual.transformer.resblocks.2"),
        ("a list", "open_clip_config.json: preprocess_cfg is a mapping, not list"),
        ("two means", "open_clip_config.json: preprocess_cfg.mean must be three numbers"),
        ("no spread", "open_clip_config.json: preprocess_cfg.std must be three numbers above 0"),
        ("cubic", "preprocess_cfg.interpolation must be one of bicubic, bilinear, random, not 'cubic'"),
        ("tokenizer", "text_cfg.tokenizer_kwargs: .*'lowercase'"),
        ("fewer", r"1 missing \(first visual.proj\)"),
    ],
)
def test_a_damaged_directory_is_explained_in_one_line(how, message, tmp_path):
    save(encoder(), tmp_path / "model")
    damage(tmp_path / "model", how)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_what_is_not_there_or_not_needed_is_said(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        load(f"local-dir:{tmp_path / 'nowhere'}")
    save(encoder(), tmp_path / "model")
    with pytest.raises(UserError, match="brings its own weights"):
        load(tmp_path / "model", pretrained="openai")
    with pytest.raises(UserError, match="cannot use device 'nonsense'"):
        load(tmp_path / "model", device="nonsense")


def test_published_weights_of_another_model_are_refused_for_a_name(tmp_path):
    torch.save(encoder().clip.state_dict(), tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"other.pt: these weights do not fit ViT-S-32-alt: .*"):
        load("ViT-S-32-alt", pretrained=str(tmp_path / "other.pt"))
    (tmp_path / "other.pt").write_bytes(b"damaged")
    with pytest.raises(UserError, match="not a readable weights file"):
        load("ViT-S-32-alt", pretrained=str(tmp_path / "other.pt"))
