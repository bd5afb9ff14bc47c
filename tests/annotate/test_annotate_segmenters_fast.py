"""SAM's decoder by kernels, interpreted on a CPU: the masks of the plain decoder, image by image and together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from powerclip.annotate.segmenters.points import to_grid
from powerclip.annotate.segmenters.sam_fast import fine_cells, is_possible, to_grids

# Triton decides at its import whether it interprets: a process of its own.
SETUP = """
import numpy as np, torch
from powerclip.annotate.segmenters import sam_fast, sam_kernels
from powerclip.annotate.segmenters.mobile_sam import MobileSamNetwork, load_network
from powerclip.annotate.segmenters.overlap import distinct, mask_iou
from powerclip.annotate.segmenters.points import PointOptions, PointSegmenter, point_grid
from powerclip.annotate.segmenters.sam_fast import Encoded, FastDecoder, FastPoints

class Plain(PointSegmenter):
    name, version = "plain", "1"
    def __init__(self, network, settings):
        super().__init__(settings, {}, torch.device("cpu"), 1000)
        self.network = network
    def encode(self, given):
        return given
    def decode(self, features, points):
        return self.network.decode(features, points, self.settings.quality)

def encoded(network, features, dtype=torch.float32):
    image = network.without_mask(features).flatten(2).transpose(1, 2).contiguous().to(dtype)
    return Encoded(image, network.positions(features).to(dtype), features.shape[-1])

class Given(tuple):  # two things that `segment` takes for a batch of images
    pass
"""

RANDOM = """
sam_kernels.UPDATE_TILES = 1  # two programs for each point
torch.manual_seed(0)  # of biases
with torch.inference_mode():
    network, generator = MobileSamNetwork().eval(), torch.Generator().manual_seed(0)
    for value in [*network.mask_decoder.parameters(), *network.prompt_encoder.parameters()]:
        scale = 0.3 if value.ndim == 1 else 2 / value[0].numel() ** 0.5
        value.copy_(scale * torch.randn(value.shape, generator=generator) + (value if value.ndim == 1 else 0))
    network.prompt_encoder.pe_layer.positional_encoding_gaussian_matrix.normal_(generator=generator)
    features = torch.randn(2, 256, 8, 16, generator=generator)
    extent = torch.tensor([[1.0, 1.0], [0.8, 0.6]])  # x, y: 32 × 64 and 19 × 51 fine cells
    settings = PointOptions(points=2, quality=0, stability=0, smallest=0, largest=1, overlap=0.99, most=9)
    expected = Plain(network, settings).segment(Given((features, extent)))
    parts = [Plain(network, settings).decode(features, points * extent[:, None])
             for points in point_grid(2).split(4)]
    quality, logits = parts[0].quality, parts[0].logits

    fast = FastDecoder(network.mask_decoder, torch.float32)
    points = FastPoints(fast, network.prompt_encoder, settings)
    for together in (points, FastPoints(fast, network.prompt_encoder, settings, at_once=4)):
        masks = together.submit(encoded(network, features), extent)()
        assert [len(one) for one in masks] == [len(one) for one in expected]
        assert sum(map(len, masks)) > 3
        for one, other in zip(masks, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    for at in range(2):
        (alone,) = points.submit(encoded(network, features[at : at + 1]), extent[at : at + 1])()
        np.testing.assert_array_equal(alone, expected[at])
    sam_fast._CANDIDATES = 2  # fewer than there are: the comparison is made a second time, with all
    for one, other in zip(points.submit(encoded(network, features), extent)(), expected, strict=True):
        np.testing.assert_array_equal(one, other)

    # Points that cannot reach the quality that is asked for are not drawn.
    cells = torch.tensor([[32, 64], [19, 51]], dtype=torch.int32)
    prompts = network.prompt_encoder(point_grid(2) * extent[:, None])
    best = quality.amax(-1)
    least = float(best.sort().values[3:5].mean())
    found = fast.decode(encoded(network, features), prompts, cells, least)
    torch.testing.assert_close(found.quality.view(8, 3), quality, atol=1e-5, rtol=1e-5)
    drawn = best >= least
    assert drawn.sum() == 4
    assert found.counts.view(8, 3, 3)[~drawn].sum() == 0
    rows, columns = torch.arange(32)[:, None], torch.arange(64)
    inside = torch.stack([(rows < height) & (columns < width) for height, width in cells.tolist()])[parts[0].owner]
    logits = logits.masked_fill(~inside[:, None], -1e4)
    for at, threshold in enumerate((0, 1, -1)):
        counts = (logits > threshold).sum((-2, -1))[drawn]
        assert (found.counts.view(8, 3, 3)[drawn][..., at] - counts).abs().max() <= 2  # logits all but at the threshold
    bits = sam_fast.fine_cells(found.words, 16).view(8, 3, 32, 64)
    assert (bits[drawn] != (logits > 0)[drawn]).sum() <= 2

    masks = torch.rand(2, 40, 8, 8, generator=generator) < 0.6
    overlaps = mask_iou(masks) > 0.5
    kept = sam_kernels.keep_distinct(overlaps, torch.tensor([40, 25], dtype=torch.int32), 7)
    for one, chosen, count in zip(masks, kept, (40, 25), strict=True):
        assert (one[chosen] == distinct(one[:count], 0.5, 7)).all()
"""

REAL = """
import sys
from pathlib import Path
from annotate_examples import photo
from powerclip.data.decode import decode_rgb
with torch.inference_mode():
    network = load_network(Path(sys.argv[1]))
    pixels = torch.from_numpy(decode_rgb(photo(3, (256, 256))).copy()).permute(2, 0, 1)[None].float()
    features = network.image_encoder((pixels - 120) / 58)
    points, extent = point_grid(2)[None], torch.tensor([[64, 64]], dtype=torch.int32)
    drawn = network.decode(features, points)
    fast = FastDecoder(network.mask_decoder)
    found = fast.decode(encoded(network, features, torch.float16), network.prompt_encoder(points), extent, 0.0)
    torch.testing.assert_close(found.quality.view(4, 3), drawn.quality, atol=0.02, rtol=0)
    masks, expected = sam_fast.fine_cells(found.words, 16).view(4, 3, 64, 64), drawn.logits > 0
    overlap = (masks & expected).sum((-2, -1)) / (masks | expected).sum((-2, -1)).clamp(min=1)
    assert overlap.mean() > 0.98, overlap
"""


SAM2 = """
from transformers import Sam2Config, Sam2Model
from powerclip.annotate.segmenters import sam2_fast
torch.manual_seed(0)
with torch.inference_mode():
    network, generator = Sam2Model(Sam2Config()).eval(), torch.Generator().manual_seed(0)
    for value in [*network.mask_decoder.parameters(), *network.prompt_encoder.parameters()]:
        scale = 0.3 if value.ndim == 1 else 2 / value[0].numel() ** 0.5
        value.copy_(scale * torch.randn(value.shape, generator=generator) + (value if value.ndim == 1 else 0))
    network.prompt_encoder.shared_embedding.positional_embedding.normal_(generator=generator)
    assert sam2_fast.is_known(network)
    sizes = ((32, 32), (64, 16), (256, 8))
    features = [torch.randn(2, width, side, side, generator=generator) for width, side in sizes]
    points = torch.rand(2, 2, 2, generator=generator)
    prompts = sam2_fast.point_encoder(network)
    labels = torch.ones(2, 2, 1, dtype=torch.int)
    sparse, _ = network.prompt_encoder((points * 1024 - 0.5).unsqueeze(2), labels, None, None)
    given = sam2_fast.encoded(features, prompts, torch.float32)
    expected, quality, _, _ = network.mask_decoder(
        image_embeddings=features[2],
        image_positional_embeddings=given.positions.T.view(1, 256, 8, 8).expand(2, -1, -1, -1),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=network.prompt_encoder.no_mask_embed.weight.view(1, -1, 1, 1).expand(2, -1, 8, 8),
        multimask_output=True,
        high_resolution_features=features[:2],
    )
    fast = FastDecoder(sam2_fast.mask_decoder(network), torch.float32)
    found = fast.decode(given, prompts(points), torch.tensor([[32, 32]] * 2, dtype=torch.int32), 0.0)
    torch.testing.assert_close(found.quality.view(2, 2, 3), quality, atol=1e-5, rtol=1e-4)
    masks = sam_fast.fine_cells(found.words, 8).view(2, 2, 3, 32, 32)
    assert (masks != (expected > 0)).sum() <= 2
    assert 0.2 < masks.float().mean() < 0.8
"""


def interpret(script: str, *arguments: str) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    here = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SETUP + script, *arguments]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels_find_the_plain_decoders_masks_for_one_image_and_for_several():
    interpret(RANDOM)


def test_half_precision_draws_the_official_weights_masks():
    from test_annotate_segmenters_mobile_sam import weights_file

    interpret(REAL, str(weights_file()))


def test_kernels_draw_what_transformers_sam_2_draws():
    pytest.importorskip("transformers", reason="needs transformers: pip install 'powerclip[sam]'")
    interpret(SAM2)


@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (20, 50), (13, 64), (32, 7)])
def test_masks_of_a_batch_come_to_the_grid_as_those_of_one_image(rows, columns):
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(2, 5, 32, 64, generator=generator) < 0.3
    masks[0, 1:3] = False
    masks[0, 2, 3, 4] = True  # a speck is kept
    inside = (torch.arange(32)[:, None] < rows) & (torch.arange(64) < columns)
    grids = to_grids(masks & inside, torch.tensor([[rows, columns]] * 2))
    expected = to_grid(masks.flatten(0, 1)[:, :rows, :columns])
    np.testing.assert_array_equal(grids.flatten(0, 1), expected)


def test_the_bits_of_a_word_are_the_fine_cells_of_a_cell_in_quarters_of_quarters():
    words = torch.zeros(1, 1, 6, dtype=torch.int16)
    words[0, 0, 4] = -(2**15) + 2  # of the second row and column of 2 × 3 cells the last and the second fine cell
    (mask,) = fine_cells(words, 3)[0]
    assert mask.shape == (8, 12)
    assert mask.nonzero().tolist() == [[4, 5], [7, 7]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_masks_are_those_of_float32():
    from annotate_examples import photo
    from test_annotate_segmenters_mobile_sam import best_overlap, weights_file

    from powerclip.annotate.segmenters.base import SegmenterImage
    from powerclip.annotate.segmenters.mobile_sam import MobileSam
    from powerclip.data.decode import decode_rgb

    images = [SegmenterImage(str(seed), decode_rgb(photo(seed, (320, 200 + 40 * seed)))) for seed in range(4)]
    quick, exact = (
        MobileSam(weights_file(), torch.device("cuda"), half=False, fast=fast, points=8).segment(images)
        for fast in (True, False)
    )
    overlaps = [best_overlap(one, mask) for one, other in zip(quick, exact, strict=True) for mask in other if len(one)]
    assert len(overlaps) > 0
    assert np.mean(overlaps) > 0.97


def test_kernels_are_refused_without_a_gpu():
    from test_annotate_segmenters_mobile_sam import weights_file

    from powerclip.annotate.segmenters import load_segmenter
    from powerclip.errors import UserError

    assert not is_possible(torch.device("cpu"))
    with pytest.raises(UserError, match="fast=true computes by Triton kernels"):
        load_segmenter("mobile_sam", device="cpu", weights=str(weights_file()), fast=True)
