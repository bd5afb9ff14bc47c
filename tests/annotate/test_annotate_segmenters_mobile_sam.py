"""Our MobileSAM computes what its parts compute elsewhere: TinyViT in timm, SAM's decoder in transformers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from annotate_examples import photo

from powerclip.annotate.segmenters import SegmenterImage, load_segmenter
from powerclip.annotate.segmenters.mobile_sam import MobileSamNetwork, load_network
from powerclip.annotate.segmenters.tiny_vit import TinyViT
from powerclip.data.decode import decode_rgb
from powerclip.data.mask_codec import to_grid
from powerclip.errors import UserError


def shaken(network: torch.nn.Module) -> torch.nn.Module:
    """The network with weights, biases and statistics that are neither zero nor one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in [*network.named_parameters(), *network.named_buffers()]:
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=generator) - 0.5
                value.copy_(1 + noise if "running_var" in name else 2 * noise / max(1, value[0].numel()) ** 0.5)
    return network.eval()


def weights_file() -> Path:
    folder = os.environ.get("POWERCLIP_WEIGHTS")
    if not folder or not (Path(folder) / "mobile_sam.pt").is_file():
        pytest.skip("MobileSAM's weights: set POWERCLIP_WEIGHTS to the folder that holds mobile_sam.pt")
    return Path(folder) / "mobile_sam.pt"


@torch.inference_mode()
def test_the_encoder_is_timms_tiny_vit_with_a_last_stage_of_stride_one():
    timm = pytest.importorskip("timm")
    ours = shaken(TinyViT())
    theirs = timm.create_model("tiny_vit_5m_224", num_classes=0).eval()
    theirs.stages[3].downsample.conv2.conv.stride = (1, 1)
    state = {}
    for name, value in ours.state_dict().items():
        name = re.sub(r"patch_embed\.seq\.(\d)", lambda match: f"patch_embed.conv{int(match[1]) // 2 + 1}", name)
        name = re.sub(r"layers\.(\d)\.downsample", lambda match: f"stages.{int(match[1]) + 1}.downsample", name)
        state[re.sub(r"\.c\.", ".conv.", name.replace("layers.", "stages."))] = value
    missing = theirs.load_state_dict({name: value for name, value in state.items() if "neck" not in name}, strict=False)
    assert [name for name in missing.missing_keys if not name.startswith("head")] == []
    assert missing.unexpected_keys == []
    pixels = torch.randn(2, 3, 112, 160, generator=torch.Generator().manual_seed(1))  # 7 × 10 cells: partial windows
    expected = theirs.stages(theirs.patch_embed(pixels))
    torch.testing.assert_close(ours.layers(ours.patch_embed(pixels)), expected, atol=2e-5, rtol=1e-4)
    before = ours(pixels)
    assert before.shape == (2, 256, 7, 10)
    ours.fuse()
    torch.testing.assert_close(ours(pixels), before, atol=1e-4, rtol=1e-3)


@torch.inference_mode()
def test_the_decoder_is_transformers_sam():
    sam = pytest.importorskip("transformers.models.sam.modeling_sam")
    from transformers import SamConfig, SamMaskDecoderConfig

    network = shaken(MobileSamNetwork())
    decoder = sam.SamMaskDecoder(SamMaskDecoderConfig(attn_implementation="eager")).eval()
    prompts = sam.SamPromptEncoder(SamConfig()).eval()
    state = {}
    for name, value in network.mask_decoder.state_dict().items():
        name = re.sub(r"(?<=\d\.)norm(\d)", r"layer_norm\1", name).replace("norm_final", "layer_norm_final")
        name = re.sub(r"(mlps\.\d|head)\.layers\.([012])", _place, name)
        for ours, theirs in (("0", "upscale_conv1"), ("1", "upscale_layer_norm"), ("3", "upscale_conv2")):
            name = name.replace(f"output_upscaling.{ours}", theirs)
        state[name] = value
    decoder.load_state_dict(state)
    encoder = network.prompt_encoder
    prompts.load_state_dict(
        {
            "shared_embedding.positional_embedding": encoder.pe_layer.positional_encoding_gaussian_matrix,
            "no_mask_embed.weight": encoder.no_mask_embed.weight,
            "not_a_point_embed.weight": encoder.not_a_point_embed.weight,
            **{f"point_embed.{at}.weight": encoder.point_embeddings[at].weight for at in range(4)},
        },
        strict=False,
    )

    generator = torch.Generator().manual_seed(2)
    features = torch.randn(2, 256, 8, 12, generator=generator)
    points = torch.rand(2, 5, 2, generator=generator)
    sparse, _ = prompts(points.unsqueeze(2) * 1024 - 0.5, torch.ones(2, 5, 1, dtype=torch.int), None, None)
    rows, columns = (torch.arange(8) + 0.5) / 8, (torch.arange(12) + 0.5) / 12
    cells = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), dim=-1)
    positions = prompts.shared_embedding(cells, input_shape=None).permute(2, 0, 1).expand(2, -1, -1, -1)
    dense = prompts.no_mask_embed.weight.view(1, -1, 1, 1).expand(2, -1, 8, 12)
    expected = decoder(features, positions, sparse, dense, multimask_output=True)
    drawn = network.decode(features, points)
    assert drawn.logits.shape == (10, 3, 32, 48)
    assert drawn.owner.tolist() == [0] * 5 + [1] * 5
    torch.testing.assert_close(drawn.logits, expected[0].flatten(0, 1), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(drawn.quality, expected[1].flatten(0, 1), atol=1e-4, rtol=1e-3)

    best = drawn.quality.amax(-1)
    least = float(best.median())
    fewer = network.decode(features, points, least)
    assert 0 < len(fewer.owner) < 10
    torch.testing.assert_close(fewer.logits, drawn.logits[best >= least], atol=1e-5, rtol=1e-4)
    assert (fewer.owner == drawn.owner[best >= least]).all()
    assert len(network.decode(features, points, 1e9).logits) == 0


def best_overlap(masks: np.ndarray, wanted: np.ndarray) -> float:
    return max((mask & wanted).sum() / (mask | wanted).sum() for mask in masks)


def _place(match: re.Match[str]) -> str:
    return f"{match[1]}.{('proj_in', 'layers.0', 'proj_out')[int(match[2])]}"


def test_without_weights_and_with_wrong_ones_it_says_what_to_give(tmp_path):
    with pytest.raises(UserError, match="give the weights file with --weights"):
        load_segmenter("mobile_sam", "cpu")
    with pytest.raises(UserError, match="no weights file"):
        load_segmenter("mobile_sam", "cpu", str(tmp_path / "gone.pt"))
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("no weights")
    (tmp_path / "empty.pt").touch()
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("other", "text", "empty", "list"):
        with pytest.raises(UserError, match=rf"{name}\.pt (cannot be read as a|is no) weights file") as caught:
            load_network(tmp_path / f"{name}.pt")
        assert "weights_only" not in str(caught.value)  # torch's advice to programmers


def test_the_official_weights_find_the_discs_of_a_drawing():
    segmenter = load_segmenter("mobile_sam", "cpu", str(weights_file()), points=5)
    assert segmenter.options["weights"] == "sha256:6dbb90523a35330f"
    pixels = decode_rgb(photo(3, (320, 240)))
    rows, columns = np.mgrid[:240, :320]
    disc = (rows - 120) ** 2 + (columns - 200) ** 2 < 50**2
    pixels = np.where(disc[..., None], np.uint8((250, 40, 40)), pixels)
    (masks,) = segmenter.segment([SegmenterImage("one", pixels)])
    assert best_overlap(masks, to_grid(disc)) > 0.9
