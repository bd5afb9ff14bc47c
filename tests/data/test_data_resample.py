"""Crops by products of matrices are those of `grid_sample`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from powerclip.data.corpus_loader import random_crops
from powerclip.data.resample import crop_batch, cubic_weights


def sampled(images: Tensor, crops: Tensor, size: tuple[int, int]) -> Tensor:
    """The literal version, in double precision."""
    crops = crops.double()
    theta = torch.zeros(len(crops), 2, 3, dtype=torch.float64)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = crops[:, 2], crops[:, 3], crops[:, :2]
    where = F.affine_grid(theta, [len(crops), 3, *size], align_corners=False)
    found = F.grid_sample(images.double(), where, mode="bicubic", padding_mode="border", align_corners=False)
    return found.clamp(0, 255)


@pytest.mark.parametrize(
    ("image", "size", "smallest"),
    [((128, 128), (112, 112), 0.9), ((20, 33), (17, 40), 0.05), ((5, 4), (9, 3), 1.0), ((64, 64), (64, 64), 0.3)],
)
def test_crops_are_those_of_grid_sample(image: tuple[int, int], size: tuple[int, int], smallest: float) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, *image), generator=generator, dtype=torch.uint8)
    crops = random_crops(6, smallest, generator)
    found = crop_batch(images, crops, size)
    assert found.shape == (6, 3, *size)
    assert found.is_contiguous()
    # float32 knows a place of 128 to 1e-5 pixels, of which each may differ from the next by 255.
    torch.testing.assert_close(found.double(), sampled(images, crops, size), rtol=0, atol=0.02)


def test_a_whole_image_at_its_own_size_is_itself() -> None:
    images = torch.randint(0, 256, (2, 3, 7, 9), dtype=torch.uint8)
    whole = torch.tensor([[0.0, 0.0, 1.0, 1.0]]).expand(2, 4)
    torch.testing.assert_close(crop_batch(images, whole, (7, 9)), images.float(), rtol=0, atol=1e-3)


def test_every_cell_takes_one_pixel_in_all() -> None:
    weights = cubic_weights(torch.tensor([0.0, -0.5, 0.5]), torch.tensor([1.0, 0.5, 0.5]), 11, 6)
    assert weights.shape == (3, 11, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 11))
