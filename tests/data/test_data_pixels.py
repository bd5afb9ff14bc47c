"""Pixels on their device: normalised as the tower wants, cropped as `grid_sample` does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.data.crops import crop_boxes
from powerclip.data.pixels import Normaliser, crop_batch, cubic_weights


def sampled(images: Tensor, crops: Tensor, size: tuple[int, int]) -> Tensor:
    """The literal version, in double precision."""
    start, end = crops.double().chunk(2, 1)
    theta = torch.zeros(len(crops), 2, 3, dtype=torch.float64)
    # From −1 … 1 in the crop to −1 … 1 in the image.
    theta[:, [0, 1], [0, 1]], theta[:, :, 2] = end - start, start + end - 1
    where = F.affine_grid(theta, [len(crops), 3, *size], align_corners=False)
    pixels = F.grid_sample(images.double(), where, mode="bicubic", padding_mode="border", align_corners=False)
    return pixels.clamp(0, 255)


@pytest.mark.parametrize(
    ("image", "size", "smallest"),
    [((128, 128), (112, 112), 0.9), ((20, 33), (17, 40), 0.05), ((5, 4), (9, 3), 1.0), ((64, 64), (64, 64), 0.3)],
)
def test_crops_are_those_of_grid_sample(image: tuple[int, int], size: tuple[int, int], smallest: float) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, *image), generator=generator, dtype=torch.uint8)
    crops = crop_boxes(torch.rand(6, 4, generator=generator), smallest)
    pixels = crop_batch(images, crops, size)
    assert pixels.shape == (6, 3, *size)
    assert pixels.is_contiguous()
    # float32 knows a place of 128 to 1e-5 pixels, of which each may differ from the next by 255.
    torch.testing.assert_close(pixels.double(), sampled(images, crops, size), rtol=0, atol=0.02)


def test_a_whole_image_at_its_own_size_is_itself() -> None:
    images = torch.randint(0, 256, (2, 3, 7, 9), dtype=torch.uint8)
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(2, 4)
    torch.testing.assert_close(crop_batch(images, whole, (7, 9)), images.float(), rtol=0, atol=1e-3)


def test_every_cell_takes_one_pixel_in_all() -> None:
    weights = cubic_weights(torch.tensor([0.0, 0.0, 0.5]), torch.tensor([1.0, 0.5, 1.0]), 11, 6)
    assert weights.shape == (3, 11, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 11))


def test_pixels_are_normalised_as_the_tower_wants():
    pixels = torch.randint(0, 256, (2, 3, 4, 4)).float()
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    expected = (pixels / 255 - mean) / std
    assert torch.allclose(Normaliser([0.1, 0.2, 0.3], [0.5, 0.6, 0.7])(pixels.clone()), expected, atol=1e-5)
