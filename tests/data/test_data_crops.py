"""Random crops: inside the image, of the areas and shapes that RandomResizedCrop draws, in one go."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from powerclip.data.crops import crop_boxes, random_crop
from powerclip.data.keyed_random import key_of


def measured(crops: torch.Tensor, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Areas as shares of the image's, and aspect ratios, of crops of an image of that aspect ratio."""
    width, height = (crops[:, 2:] - crops[:, :2]).unbind(1)
    return width * height, ratio * width / height


@given(st.integers(1, 2000), st.integers(1, 2000), st.floats(0.05, 1.0), st.integers(0, 2**63))
def test_a_crop_lies_inside_its_image_and_is_not_empty(width, height, smallest, key):
    box = random_crop(width, height, smallest, key)
    assert 0 <= box.left < box.right <= width
    assert 0 <= box.top < box.bottom <= height


@given(st.integers(50, 800), st.integers(50, 800), st.floats(0.05, 1.0), st.integers(0, 2**63))
def test_a_crop_in_pixels_keeps_the_area_and_the_shape_that_it_may(width, height, smallest, key):
    box = random_crop(width, height, smallest, key)
    ratio = box.width / box.height
    rounding = 2 / min(box.width, box.height)
    assert 3 / 4 * (1 - rounding) <= ratio <= 4 / 3 * (1 + rounding)
    if 3 / 4 <= width / height <= 4 / 3:  # else no crop of that area may fit
        assert box.width * box.height >= smallest * width * height * (1 - 2 * rounding)


@pytest.mark.parametrize("smallest", [0.08, 0.5, 0.9, 1.0])
def test_crops_of_square_images_have_any_area_and_shape_that_fits(smallest):
    crops = crop_boxes(torch.rand(4000, 4, generator=torch.Generator().manual_seed(0)), smallest)
    area, aspect = measured(crops, 1.0)
    assert crops.min() >= 0
    assert crops.max() <= 1 + 1e-6
    assert area.min() >= smallest - 1e-5
    assert area.mean() == pytest.approx((1 + smallest) / 2, abs=0.02)
    assert aspect.log().abs().max() <= math.log(4 / 3) + 1e-5
    if smallest == 1:
        assert torch.equal(crops, torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(4000, 4))
    else:
        # Area and shape are as independent as fitting allows: the shape of small crops goes all the way.
        bound = (1 / area).clamp(max=4 / 3).log()
        position = aspect.log() / bound
        assert position[area < 0.999].mean().abs() < 0.05
        assert position[area < 0.999].std() == pytest.approx(3**-0.5, abs=0.03)
        assert ((crops[:, :2] + crops[:, 2:]).mean(0) - 1).abs().max() < 0.05


@pytest.mark.parametrize("ratio", [0.4, 0.7, 1.2, 1.6, 3.0])
def test_an_image_of_any_shape_gives_crops_of_the_areas_that_fit_and_else_the_largest_in_the_middle(ratio):
    draws = torch.rand(2000, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    area, aspect = measured(crops := crop_boxes(draws, 0.1, ratio), ratio)
    drawn = 0.1 + 0.9 * draws[:, 0]
    most = min(1.0, 4 / 3 / ratio, ratio * 4 / 3)  # the largest crop that has an allowed shape
    assert aspect.min() >= 3 / 4 - 1e-6
    assert aspect.max() <= 4 / 3 + 1e-6
    torch.testing.assert_close(area, drawn.clamp(max=most))
    middle = crops[drawn > most]
    assert (len(middle) > 0) == (most < 1)
    torch.testing.assert_close(middle[:, :2], 1 - middle[:, 2:])


def test_crops_in_pixels_are_drawn_as_torchvision_draws_them():
    # Crops of up to half of a square always fit: torchvision never draws again, and the two rules are one.
    width, height, smallest, largest, count = 400, 400, 0.1, 0.5, 3000
    boxes = [random_crop(width, height, smallest, key_of(number)) for number in range(3 * count)]
    ours = np.array([box for box in boxes if box.width * box.height <= largest * width * height])
    torch.manual_seed(0)
    image = torch.zeros(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, (smallest, largest), (3 / 4, 4 / 3)) for _ in range(count)])
    top, left, h, w = theirs.T
    theirs = np.stack([left, top, left + w, top + h], 1)
    for statistic in (np.mean, np.std):
        error = np.abs(statistic(ours, axis=0) - statistic(theirs, axis=0))
        assert (error < 5 * 100 / math.sqrt(count)).all()  # pixels; the std of an edge is about 100


def test_the_whole_image_is_shown_when_nothing_may_be_cut():
    assert {random_crop(40, 40, 1.0, key) for key in range(20)} == {(0, 0, 40, 40)}
