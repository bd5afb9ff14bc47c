"""Models by name and by config, and the message when there is no such model."""

import pytest
import torch
from tiny_towers import tiny_config

from powerclip.encoders import build, tokenizer_for
from powerclip.encoders.models import named, supported_models
from powerclip.errors import UserError


def test_a_name_gives_open_clips_model():
    model = build("ViT-S-32-alt")
    assert model.grid == (7, 7)
    assert model.context_length == 77
    assert model.embed_dim == 256


@pytest.mark.parametrize("name", ["ViT-B-16", "ViT-B/16"])
def test_both_spellings_of_a_name_are_known(name):
    assert named(name).source == "ViT-B-16"


def test_supported_models_are_those_whose_towers_have_tokens():
    names = supported_models()
    assert {"ViT-B-16", "ViT-L-14-CLIPA", "ViT-H-14-worldwide", "ViT-B-16-SigLIP", "roberta-ViT-B-32"} <= set(names)
    assert not {"RN50", "coca_ViT-B-32", "convnext_base"} & set(names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ViT-B-17", "no model 'ViT-B-17'.*did you mean 'ViT-B-16'"),
        ("runs/nowhere", "no model 'runs/nowhere'"),
        ("RN50", "RN50: the image tower is a ResNet"),
        ("convnext_base", "the image tower is timm's convnext_base, which has no patch tokens"),
        ("coca_ViT-B-32", "CoCa"),
        ("ViT-B-16/laion2b_s34b_b88", "no pretrained weights 'laion2b_s34b_b88'.*did you mean 'laion2b_s34b_b88k'"),
    ],
)
def test_a_name_that_does_not_work_is_explained(name, message):
    with pytest.raises(UserError, match=message):
        build(name)


def test_two_different_tags_are_one_too_many():
    with pytest.raises(UserError, match="two kinds of pretrained weights"):
        build("ViT-B-16/openai", pretrained="laion400m_e32")


def test_a_failed_download_is_one_clear_line(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"could not download ViT-B-16 \(laion2b_s34b_b88k\): .+") as caught:
        build("ViT-B-16", pretrained="laion2b_s34b_b88k")
    assert "\n" not in str(caught.value)


def test_weights_trained_with_quick_gelu_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("powerclip.encoders.models.download", lambda entry, what: tmp_path / "weights")
    assert named("ViT-B-16", "openai").config["quick_gelu"] is True
    assert "quick_gelu" not in named("ViT-B-16", "laion2b_s34b_b88k").config


def test_a_newer_release_may_list_models_without_an_image_tower_or_weights(monkeypatch):
    import open_clip

    def tags(name):
        raise KeyError(name)

    config = open_clip.get_model_config
    monkeypatch.setattr(open_clip, "list_models", lambda: ["CLAP", "ViT-S-32-alt"])
    monkeypatch.setattr(
        open_clip, "get_model_config", lambda name: {"audio_cfg": {}} if name == "CLAP" else config(name)
    )
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", tags)
    with pytest.raises(UserError, match=r"no model 'ViT-S-32-old'.*did you mean 'ViT-S-32-alt'"):
        build("ViT-S-32-old")
    with pytest.raises(UserError, match=r"no pretrained weights 'openai'.*known: none"):
        build("ViT-S-32-alt/openai")


def changed(part: str, **settings):
    config = tiny_config()
    (config[part] if part else config).update(settings)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"embed_dim": 8}, "needs 'vision_cfg'"),
        ([], "a mapping, not list"),
        (changed("", text_cfg=3), "text_cfg is a mapping, not int"),
        (changed("vision_cfg", patchsize=4), r"unknown setting vision_cfg.patchsize \(did you mean 'patch_size'\?\)"),
        (changed("text_cfg", head=4), r"unknown setting text_cfg.head \(did you mean 'heads'\?\)"),
        (changed("", quickgelu=True), r"unknown setting quickgelu \(did you mean 'quick_gelu'\?\)"),
        (
            changed("vision_cfg", head_width=64),
            r"vision_cfg.width \(32\) must be a multiple of vision_cfg.head_width \(64\)",
        ),
        (changed("text_cfg", heads=3), r"text_cfg.width \(40\) must be a multiple of text_cfg.heads \(3\)"),
        (
            changed("vision_cfg", image_size=[32, 44]),
            r"vision_cfg.image_size \(32×44\) must be a multiple of vision_cfg.patch_size \(8×8\)",
        ),
        (changed("vision_cfg", image_size=4), r"image_size \(4×4\) must be a multiple of .*patch_size \(8×8\)"),
        (changed("vision_cfg", pool_type="sum"), "cannot be built"),
        (changed("vision_cfg", pool_type="none"), "the image tower has pool_type 'none'"),
        (changed("vision_cfg", attentional_pool="parallel", attn_pooler_heads=2), "pools twice|pool_type 'none'"),
        (changed("text_cfg", pool_type="none"), "the text tower has pool_type 'none'"),
        (changed("text_cfg", embed_cls=True), "needs custom_text"),
        (changed("text_cfg", proj_type="none"), "no projection and width 40, the image tower gives 24"),
    ],
)
def test_a_config_that_does_not_work_is_explained(config, message):
    with pytest.raises(UserError, match=message):
        build(config=config)


def test_a_model_is_a_name_or_a_config():
    for arguments in ({}, {"name": "ViT-B-16", "config": tiny_config()}):
        with pytest.raises(UserError, match="a model is given by its name"):
            build(**arguments)


def test_a_config_says_where_the_logit_scale_starts():
    assert build(config=tiny_config()).clip.logit_scale.exp().item() == pytest.approx(1 / 0.07)
    config = {**tiny_config(), "init_logit_scale": 1.609}
    assert build(config=config).clip.logit_scale.exp().item() == pytest.approx(5, abs=0.01)


def test_building_leaves_the_callers_config_alone():
    config = tiny_config("custom-text")
    model = build(config=config)
    assert config == tiny_config("custom-text")
    model.config["embed_dim"] = 0
    assert config["embed_dim"] == 24


def test_weights_from_a_file_fill_a_config(tmp_path):
    first, second = build(config=tiny_config()), build(config=tiny_config())
    torch.save(first.clip.state_dict(), tmp_path / "weights.pt")
    assert not torch.equal(first.clip.visual.proj, second.clip.visual.proj)
    loaded = build(config=tiny_config(), pretrained=str(tmp_path / "weights.pt"))
    assert torch.equal(loaded.clip.visual.proj, first.clip.visual.proj)
    with pytest.raises(UserError, match="no weights file"):
        build(config=tiny_config(), pretrained=str(tmp_path / "other.pt"))


def test_the_tokenizer_reads_as_many_tokens_as_the_model():
    assert tokenizer_for(build(config=tiny_config()))(["a dog"]).shape == (1, 16)
