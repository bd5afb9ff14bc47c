"""ONNX graphs and torch programs compute what the model computes, for any batch and any length."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest
import torch
from tiny_model import captions_of_lengths, save_tiny_model, tiny_model
from torch import Tensor
from transformers import AutoTokenizer, CLIPImageProcessor

from powerclip.data.scenes import render, test_scenes
from powerclip.encoders import DualEncoder, load, save, tokenizer_for
from powerclip.errors import UserError
from powerclip.export.check import difference
from powerclip.export.folder import CheckOptions, export_model
from powerclip.export.onnx import OnnxModel
from powerclip.export.pt2 import Pt2Model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def model(saved: Path) -> DualEncoder:
    return load(saved)[0]


@pytest.fixture(scope="module")
def onnx_folder(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three precisions with dense features, checked."""
    folder = tmp_path_factory.mktemp("export") / "onnx"
    export_model(saved, "onnx", folder, dense=True, precisions=("fp32", "fp16", "int8"), check=CheckOptions())
    return folder


@pytest.fixture(scope="module")
def pt2_folder(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "pt2"
    export_model(saved, "pt2", folder, dense=True, check=CheckOptions())
    return folder


def outputs_of(model: DualEncoder, pixels: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    with torch.inference_mode():
        image, patches = model.encode_patches(pixels)
        text, words = model.encode_words(tokens)
    return {"image_embeds": image, "patch_embeds": patches, "text_embeds": text, "token_embeds": words}


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
@pytest.mark.parametrize("batch", [1, 5])
def test_an_export_equals_the_model_for_any_batch_and_length(kind, batch, model, onnx_folder, pt2_folder):
    exported = OnnxModel(onnx_folder) if kind == "onnx" else Pt2Model(pt2_folder)
    pixels = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))
    for tokens in captions_of_lengths(3, 17, model.context_length):
        tokens = tokens[[0, 1, 0, 1, 0][:batch]]
        expected = outputs_of(model, pixels, tokens)
        given = {**exported.run("vision_model", pixels), **exported.run("text_model", tokens)}
        assert given.keys() == expected.keys()
        for name, value in expected.items():
            assert difference(given[name], value) < 1e-5, name


def test_graphs_have_the_names_and_free_axes_that_the_ecosystem_expects(onnx_folder):
    shapes = {}
    for name in ("vision_model", "text_model"):
        session = onnxruntime.InferenceSession(onnx_folder / "onnx" / f"{name}.onnx")
        shapes |= {value.name: value.shape for value in [*session.get_inputs(), *session.get_outputs()]}
    assert shapes == {
        "pixel_values": ["batch", 3, 32, 32],
        "image_embeds": ["batch", 16],
        "patch_embeds": ["batch", 16, 16],
        "input_ids": ["batch", "sequence"],
        "text_embeds": ["batch", 16],
        "token_embeds": ["batch", "sequence", 16],
    }


def test_a_file_holds_the_weights_of_its_own_tower_only(pt2_folder, onnx_folder):
    embedding = 4 * 49408 * 24  # bytes, of the text tower
    for path in (pt2_folder / "vision_model.pt2", onnx_folder / "onnx" / "vision_model.onnx"):
        assert path.stat().st_size < embedding / 4


def test_lower_precision_takes_less_room_and_its_vectors_keep_their_length(onnx_folder):
    sizes = [(onnx_folder / "onnx" / f"text_model{ending}.onnx").stat().st_size for ending in ("", "_fp16", "_int8")]
    assert sizes[1] < 0.6 * sizes[0]
    assert sizes[2] < 0.3 * sizes[0]
    for precision in ("fp16", "int8"):
        embeds = OnnxModel(onnx_folder, precision).run("vision_model", torch.randn(4, 3, 32, 32))["image_embeds"]
        assert embeds.dtype == torch.float32
        torch.testing.assert_close(embeds.norm(dim=-1), torch.ones(4), rtol=0, atol=1e-5)


def test_a_user_with_onnxruntime_and_the_files_beside_it_gets_the_models_embeddings(onnx_folder, saved):
    """No code of this package: onnxruntime, transformers' tokenizer and image processor, as the card shows it."""
    scenes = test_scenes(4, seed=0)
    captions, images = [scene.caption for scene in scenes], list(render(scenes, 32))
    pixels = CLIPImageProcessor.from_pretrained(onnx_folder)(images=images, return_tensors="np")["pixel_values"]
    ids = AutoTokenizer.from_pretrained(onnx_folder)(captions, padding=True, truncation=True, return_tensors="np")
    vision, text = (
        onnxruntime.InferenceSession(onnx_folder / "onnx" / name) for name in ("vision_model.onnx", "text_model.onnx")
    )
    image_embeds = vision.run(["image_embeds"], {"pixel_values": pixels})[0]
    text_embeds = text.run(["text_embeds"], {"input_ids": ids["input_ids"]})[0]

    from torchvision.transforms.functional import to_pil_image

    model, preprocess, tokenizer = load(saved)
    with torch.inference_mode():
        expected_image = model.encode_image(torch.stack([preprocess(to_pil_image(image)) for image in images]))
        expected_text = model.encode_text(tokenizer(captions))
    assert difference(torch.from_numpy(image_embeds), expected_image) < 1e-5
    assert difference(torch.from_numpy(text_embeds), expected_text) < 1e-5


def test_the_written_tokenizer_gives_open_clips_ids(onnx_folder, model):
    captions = ["A dog's ball, 12 cats!", "two   spaces", "日本語 🐶", "don't ... (what)", "word " * 60, ""]
    ids = AutoTokenizer.from_pretrained(onnx_folder)(captions, truncation=True)["input_ids"]
    for own, other in zip(tokenizer_for(model)(captions).tolist(), ids, strict=True):
        assert own[: len(other)] == other
        assert not any(own[len(other) :])


def test_the_folder_says_what_transformers_js_needs(onnx_folder):
    assert json.loads((onnx_folder / "config.json").read_text())["model_type"] == "clip"
    names = {path.name for path in (onnx_folder / "onnx").iterdir()}
    assert names == {
        f"{tower}_model{precision}.onnx" for tower in ("vision", "text") for precision in ("", "_fp16", "_int8")
    }


def test_a_tower_that_reads_ahead_takes_whole_captions_and_without_dense_there_are_only_global_embeddings(
    tmp_path, capsys
):
    model = tiny_model(no_causal_mask=True)
    export_model(save(model, tmp_path / "model"), "pt2", tmp_path / "out")
    assert "pad input_ids to 40 tokens with id 0" in capsys.readouterr().out.replace("\n", " ")
    exported = Pt2Model(tmp_path / "out")
    assert exported.run("vision_model", torch.zeros(2, 3, 32, 32)).keys() == {"image_embeds"}
    (tokens,) = captions_of_lengths(model.context_length)
    tokens[0, 5:] = 0
    with torch.inference_mode():
        expected = model.encode_text(tokens)
    assert difference(exported.run("text_model", tokens)["text_embeds"], expected) < 1e-5


def test_int8_is_refused_where_there_is_none_before_a_model_is_loaded(tmp_path):
    with pytest.raises(UserError, match="--to pt2 has no precision int8: choose fp32 or fp16, or --to onnx"):
        export_model("no/such/model", "pt2", tmp_path / "out", precisions=("int8",))
