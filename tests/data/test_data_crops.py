"""Random crops: inside the image, of the areas and shapes that RandomResizedCrop draws."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import RandomResizedCrop

from powerclip.data.crops import random_crop
from powerclip.data.keyed_random import key_of


@given(st.integers(1, 2000), st.integers(1, 2000), st.floats(0.05, 1.0), st.integers(0, 2**63))
def test_a_crop_lies_inside_its_image_and_is_not_empty(width, height, smallest, key):
    box = random_crop(width, height, smallest, key)
    assert 0 <= box.left < box.right <= width
    assert 0 <= box.top < box.bottom <= height


@given(st.integers(50, 800), st.integers(50, 800), st.floats(0.05, 1.0), st.integers(0, 2**63))
def test_a_crop_keeps_the_area_and_the_shape_that_it_may(width, height, smallest, key):
    box = random_crop(width, height, smallest, key)
    ratio = box.width / box.height
    rounding = 2 / min(box.width, box.height)
    assert 3 / 4 * (1 - rounding) <= ratio <= 4 / 3 * (1 + rounding)
    if 3 / 4 <= width / height <= 4 / 3:  # else no crop of that area may fit
        assert box.width * box.height >= smallest * width * height * (1 - 2 * rounding)


def test_crops_are_drawn_as_torchvision_draws_them():
    width, height, smallest, count = 400, 300, 0.3, 3000
    ours = np.array([random_crop(width, height, smallest, key_of(number)) for number in range(count)])
    torch.manual_seed(0)
    image = torch.zeros(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, (smallest, 1.0), (3 / 4, 4 / 3)) for _ in range(count)])
    top, left, h, w = theirs.T
    theirs = np.stack([left, top, left + w, top + h], 1)
    for statistic in (np.mean, np.std):
        error = np.abs(statistic(ours, axis=0) - statistic(theirs, axis=0))
        assert (error < 5 * 100 / math.sqrt(count)).all()  # pixels; the spread of an edge is about 100


def test_the_whole_image_is_shown_when_nothing_may_be_cut():
    assert {random_crop(40, 40, 1.0, key) for key in range(20)} == {(0, 0, 40, 40)}
