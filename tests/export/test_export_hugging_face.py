"""A CLIPModel folder: transformers computes what the model computes, and the way back keeps every bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import TOWERS, captions_of_lengths, save_tiny_model, tiny_model
from torchvision.transforms.functional import to_pil_image
from transformers import CLIPModel, CLIPProcessor

from powerclip.data.scenes import render, test_scenes
from powerclip.encoders import build, load, tokenizer_for
from powerclip.errors import UserError
from powerclip.export.check import difference
from powerclip.export.folder import CheckOptions, export_model
from powerclip.export.hugging_face import HuggingFaceModel, write_hugging_face


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def folder(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("export") / "hf"
    (parity,) = export_model(saved, "hf", target, check=CheckOptions())
    assert parity.worst < 1e-5
    assert parity.other_tokens == 0
    return target


def test_transformers_gives_the_models_embeddings_and_logits(folder, saved):
    """No code of this package: CLIPModel and CLIPProcessor, as the card shows it."""
    scenes = test_scenes(3, seed=0)
    captions, images = [scene.caption for scene in scenes], [to_pil_image(image) for image in render(scenes, 32)]
    theirs, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    model, preprocess, tokenizer = load(saved)
    with torch.inference_mode():
        given = theirs(**processor(text=captions, images=images, return_tensors="pt", padding=True))
        features = model(torch.stack([preprocess(image) for image in images]), tokenizer(captions))
    assert difference(given.image_embeds, features.image) < 1e-5
    assert difference(given.text_embeds, features.text) < 1e-5
    expected = features.logit_scale * features.image @ features.text.T
    torch.testing.assert_close(given.logits_per_image, expected, rtol=1e-4, atol=1e-4)


def test_patches_and_words_are_equal_too(folder, saved):
    model, exported = load(saved)[0], HuggingFaceModel(folder)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for tokens in captions_of_lengths(5, model.context_length):
        with torch.inference_mode():
            patches, words = model.encode_patches(pixels)[1], model.encode_words(tokens)[1]
        assert difference(exported.run("vision_model", pixels)["patch_embeds"], patches) < 1e-5
        assert difference(exported.run("text_model", tokens)["token_embeds"], words) < 1e-5


def test_the_way_back_keeps_every_bit_and_the_tokenizer(folder, saved):
    (model, _, tokenizer), (back, _, tokenizer_back) = load(saved), load(folder)
    weights = back.clip.state_dict()
    assert weights.keys() == model.clip.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.clip.state_dict().items())
    assert type(tokenizer_back) is type(tokenizer)
    captions = [scene.caption for scene in test_scenes(3, seed=0)]
    assert torch.equal(tokenizer_back(captions), tokenizer(captions))


def test_half_precision_is_stored_in_half_the_room(tmp_path):
    model = tiny_model()
    (tmp_path / "half").mkdir()
    write_hugging_face(model, tokenizer_for(model), tmp_path / "half", precision="fp16")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (tmp_path / "half" / "model.safetensors").stat().st_size < 2.1 * parameters
    assert CLIPModel.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.float16


@pytest.mark.parametrize(
    ("vision", "text", "reason"),
    [({"pool_type": "avg"}, {}, "pools patches by 'avg'"), ({}, {"no_causal_mask": True}, "text_cfg.no_causal_mask")],
)
def test_what_a_clip_model_cannot_hold_is_refused_with_the_reason(vision, text, reason, tmp_path):
    towers = {"vision_cfg": {**TOWERS["vision_cfg"], **vision}, "text_cfg": {**TOWERS["text_cfg"], **text}}
    model = build(config={**TOWERS, **towers})
    with pytest.raises(UserError, match=reason):
        write_hugging_face(model, tokenizer_for(model), tmp_path)
    assert list(tmp_path.iterdir()) == []
