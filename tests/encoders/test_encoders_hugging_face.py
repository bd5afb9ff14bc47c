"""Hugging Face's CLIPModel becomes open_clip's CLIP and back: the same features, and not a bit lost on the way."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_towers import captions, tiny_config

from powerclip.encoders import build, load
from powerclip.encoders.hugging_face import from_clip_model, to_clip_model
from powerclip.errors import UserError

transformers = pytest.importorskip("transformers")
# The one that prepares images with PIL, as open_clip does; newer releases call it so.
ImageProcessor = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor

TEXT: dict[str, Any] = {"vocab_size": 100, "eos_token_id": 99, "bos_token_id": 98, "max_position_embeddings": 16}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "quick-gelu": ({}, {}),
    "gelu": ({"hidden_act": "gelu"}, {"hidden_act": "gelu"}),
    "tanh-gelu": ({"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": "gelu"}),
    "eps": ({"layer_norm_eps": 1e-3}, {"layer_norm_eps": 1e-2, "intermediate_size": 100}),
    "old-eos": ({}, {"eos_token_id": 2}),
    "another-eos": ({}, {"eos_token_id": 57}),
}


def theirs(variant: str = "quick-gelu"):
    """A tiny CLIPModel of transformers, with every weight drawn at random."""
    vision, text = VARIANTS[variant]
    size = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        vision_config={"image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64, **size, **vision},
        text_config={**TEXT, "hidden_size": 40, "intermediate_size": 80, **size, **text},
        projection_dim=24,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def stored(folder: Path, variant: str = "quick-gelu") -> Path:
    theirs(variant).save_pretrained(folder)
    ImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    return folder


def tokens_of(variant: str) -> torch.Tensor:
    tokens = captions(9, 4, 12)
    if variant == "another-eos":  # an end that is not the largest id
        tokens[tokens == 57] = 58
        tokens[tokens == 99] = 57
    return tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_clip_model_has_the_same_global_and_dense_features(variant, tmp_path):
    model, _, _ = load(stored(tmp_path, variant))
    images, tokens = torch.randn(3, 3, 32, 32), tokens_of(variant)
    other = theirs(variant)
    with torch.no_grad():
        ours = model(images, tokens)
        vision = other.vision_model(images)
        text = other.text_model(tokens)
        patches = other.visual_projection(other.vision_model.post_layernorm(vision.last_hidden_state[:, 1:]))
        words = other.text_projection(text.last_hidden_state)
        image = F.normalize(other.visual_projection(vision.pooler_output), dim=-1)
        caption = F.normalize(other.text_projection(text.pooler_output), dim=-1)
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(ours.image, image, **close)
    torch.testing.assert_close(ours.text, caption, **close)
    torch.testing.assert_close(ours.patches, patches, **close)
    torch.testing.assert_close(ours.words, words, **close)
    torch.testing.assert_close(ours.logit_scale, other.logit_scale.exp().detach(), **close)


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back_keeps_every_bit_and_the_config(variant, tmp_path):
    model, _, _ = load(stored(tmp_path, variant))
    config, state, preprocessor = to_clip_model(model)
    before = load_file(tmp_path / "model.safetensors")
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], before[name]) for name in before)
    again, weights = from_clip_model(config, state)
    assert {**again, "quick_gelu": bool(again.get("quick_gelu"))} == model.config
    assert all(torch.equal(weights[name], value) for name, value in model.clip.state_dict().items())
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    reloaded = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    tokens = tokens_of(variant)
    original = theirs(variant).text_model(tokens).pooler_output
    assert torch.equal(reloaded.text_model(tokens).pooler_output, original)


@pytest.mark.parametrize("variant", ["custom-text", "ln-after-tok", "eos-pool", "eos-pool-clip"])
def test_open_clips_own_variants_give_the_same_embeddings_in_transformers(variant):
    config = tiny_config(variant)
    config["vision_cfg"]["image_size"] = 32
    torch.manual_seed(1)
    model = build(config=config).eval()
    of_model, state, _ = to_clip_model(model)
    other = transformers.CLIPModel(transformers.CLIPConfig(**of_model)).eval()
    other.load_state_dict(state)
    images, tokens = torch.randn(2, 3, 32, 32), captions(9, 4)
    with torch.no_grad():
        result = other(input_ids=tokens, pixel_values=images)
        torch.testing.assert_close(model.encode_image(images), result.image_embeds, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(model.encode_text(tokens), result.text_embeds, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("squash", [False, True])
def test_images_are_prepared_alike(squash, tmp_path):
    size = {"height": 32, "width": 32} if squash else {"shortest_edge": 32}
    settings = {"size": size, "do_center_crop": not squash, "crop_size": 32, "image_mean": [0.1, 0.5, 0.6]}
    theirs_prepare = ImageProcessor(**settings, resample=2)
    stored(tmp_path)
    theirs_prepare.save_pretrained(tmp_path)
    model, preprocess, _ = load(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    expected = theirs_prepare(image, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(preprocess(image), expected, atol=1e-5, rtol=1e-5)
    back = ImageProcessor(**to_clip_model(model).preprocessor)
    torch.testing.assert_close(back(image, return_tensors="pt")["pixel_values"][0], expected)


@pytest.mark.parametrize(
    ("variant", "change", "reason"),
    [
        ("avg-pool", {}, "pools patches by 'avg'"),
        ("clipa", {}, "pools patches by 'avg'"),
        ("bidirectional", {}, "it has text_cfg.no_causal_mask True"),
        ("last-pool-causal", {}, "its text tower pools by 'last'"),
        ("class-token", {}, "it has text_cfg.embed_cls True"),
        ("linear-projection", {}, "it has text_cfg.proj_bias True"),
        ("custom-blocks", {}, "it has vision_cfg.ls_init_value 0.1"),
        ("sigmoid", {}, "a logit bias, of a sigmoid loss"),
        ("clip", {"image_size": [32, 48]}, "its images or patches are not square"),
        ("clip", {"no_ln_pre": True}, "it has vision_cfg.no_ln_pre True"),
    ],
)
def test_what_a_clip_model_cannot_hold_is_refused_with_the_reason(variant, change, reason):
    config = tiny_config(variant)
    config["vision_cfg"] |= {"image_size": 32} | change
    with pytest.raises(UserError, match=reason):
        to_clip_model(build(config=config))


def damage(folder: Path, how: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = folder / "model.safetensors"
    if how == "siglip":
        config["model_type"] = "siglip"
    elif how == "relu":
        config["text_config"]["hidden_act"] = config["vision_config"]["hidden_act"] = "relu"
    elif how == "mixed":
        config["text_config"]["hidden_act"] = "gelu"
    elif how == "no weights":
        weights.unlink()
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:999])
    elif how == "fewer":
        state = load_file(weights)
        save_file({name: value for name, value in state.items() if "k_proj" not in name}, weights)
    elif how == "wider":
        config["projection_dim"] = 32
    (folder / "config.json").write_text("{" if how == "not json" else json.dumps(config))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("siglip", "model_type is 'siglip': of Hugging Face's models only 'clip' is read"),
        ("relu", "hidden_act is 'relu'"),
        ("mixed", "share one activation, these have quick_gelu and gelu"),
        ("no weights", r"no model.safetensors beside config.json; looked for model.safetensors, pytorch_model.bin"),
        ("cut", r"model.safetensors is not a readable weights file"),
        ("fewer", r"encoder.layers.0.self_attn.k_proj.weight is missing"),
        ("wider", r"of another shape \(first .*24\] in the file, .*32\] by the config"),
        ("not json", "config.json: not a readable JSON file"),
    ],
)
def test_a_damaged_clip_model_is_explained_in_one_line(how, message, tmp_path):
    stored(tmp_path)
    damage(tmp_path, how)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_in_several_files_and_old_ones_are_read(tmp_path):
    expected = load(stored(tmp_path / "one"))[0].clip.state_dict()
    theirs().save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    shutil.copytree(tmp_path / "one", tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(theirs().state_dict(), tmp_path / "old" / "pytorch_model.bin")
    for name in ("parts", "old"):
        state = load(tmp_path / name)[0].clip.state_dict()
        assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.fixture
def hub_cache(monkeypatch, tmp_path) -> Path:
    """The hub's cache on this machine, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_clip_model_on_the_hub_is_found_by_its_id(hub_cache):
    revision = "0" * 40
    repository = hub_cache / "models--org--tiny"
    stored(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    model, _, _ = load("hf-hub:org/tiny")
    assert model.embed_dim == 24
    with pytest.raises(UserError, match=r"open_clip_config.json of hf-hub:org/none.*looked for config.json") as caught:
        load("hf-hub:org/none")
    assert "\n" not in str(caught.value)
