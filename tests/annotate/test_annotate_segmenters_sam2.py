"""SAM 2 end to end with a tiny model of random weights: from images to masks, through transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from annotate_examples import make_shard, photo

from powerclip.annotate.region_annotator import RegionAnnotator
from powerclip.annotate.segmenters import SegmenterImage, load_segmenter
from powerclip.data.decode import decode_rgb
from powerclip.data.mask_codec import GRID
from powerclip.data.sidecar import read_regions
from powerclip.errors import UserError

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'powerclip[sam]'")
ANY = {"quality": 0, "stability": 0, "smallest": 0, "largest": 1}  # random weights draw no good masks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A model of 0.1 million parameters for images of 128²."""
    torch.manual_seed(0)
    widths = [8, 16, 32, 64]
    vision = transformers.Sam2VisionConfig(
        backbone_config=transformers.Sam2HieraDetConfig(
            hidden_size=8,
            image_size=[128, 128],
            blocks_per_stage=[1, 1, 2, 1],
            embed_dim_per_stage=widths,
            num_attention_heads_per_stage=[1, 1, 2, 4],
            window_size_per_stage=[8, 4, 4, 2],
            global_attention_blocks=[3],
        ),
        backbone_channel_list=widths[::-1],
        backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
        fpn_hidden_size=32,
    )
    config = transformers.Sam2Config(
        vision_config=vision,
        prompt_encoder_config=transformers.Sam2PromptEncoderConfig(hidden_size=32, image_size=128),
        mask_decoder_config=transformers.Sam2MaskDecoderConfig(hidden_size=32, mlp_dim=32, iou_head_hidden_dim=32),
    )
    path = tmp_path_factory.mktemp("sam2")
    transformers.Sam2Model(config).save_pretrained(path)
    return str(path)


def images() -> list[SegmenterImage]:
    return [SegmenterImage(str(seed), decode_rgb(photo(seed, (100 + 30 * seed, 80)))) for seed in range(3)]


def test_images_become_masks_whatever_their_shape_and_batch(folder):
    segmenter = load_segmenter("sam2", "cpu", folder, points=3, **ANY)
    together = segmenter.segment(images())
    assert len(together) == 3
    for one, image in zip(together, images(), strict=True):
        assert one.dtype == np.bool_
        assert one.shape[1:] == (GRID, GRID)
        assert 0 < len(one) <= 27
        np.testing.assert_array_equal(one, segmenter.segment([image])[0])


def test_points_and_images_reach_the_model_as_its_own_processor_would_send_them(folder):
    segmenter = load_segmenter("sam2", "cpu", folder, points=2, **ANY)
    image = images()[0]
    with torch.inference_mode():
        encoded, extent = segmenter.encode([image])
        drawn = segmenter.decode(encoded, torch.tensor([[[0.25, 0.75]]]))
        pixels = torch.from_numpy(image.pixels.copy()).permute(2, 0, 1)[None].float()
        pixels = torch.nn.functional.interpolate(pixels, (128, 128), mode="bilinear", antialias=True) / 255
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        expected = segmenter.network(
            pixel_values=(pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1),
            input_points=torch.tensor([[[[0.25 * 128 - 0.5, 0.75 * 128 - 0.5]]]]),
        )
    assert extent.tolist() == [[1, 1]]
    torch.testing.assert_close(drawn.logits, expected.pred_masks[0], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(drawn.quality, expected.iou_scores[0], atol=1e-4, rtol=1e-3)


def test_a_shard_gets_its_masks_and_the_sidecar_names_the_weights(folder, tmp_path):
    shard = make_shard(tmp_path / "0.tar", [["a dog"], ["a cat"], ["a bird"]])
    segmenter = load_segmenter("sam2", "cpu", folder, points=2, most=5, **ANY)
    result = RegionAnnotator(segmenter, batch=2).annotate(str(shard))
    assert result.items > 0
    regions = read_regions(tmp_path / "0.regions.parquet")
    assert 0 < len(regions.masks("00001")) <= 5
    assert regions.info.annotator.name == "sam2"
    assert regions.info.annotator.options["weights"].startswith("sha256:")


def test_a_folder_without_a_model_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="SAM 2 cannot be loaded from"):
        load_segmenter("sam2", "cpu", str(tmp_path))
