"""Masks come back as they were, within the bytes that a sidecar allows them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from powerclip.data.mask_codec import GRID, LARGEST, pack_mask, to_grid, unpack_mask, unpack_masks

ROWS, COLUMNS = np.mgrid[:GRID, :GRID]


@st.composite
def shapes(draw: st.DrawFn) -> np.ndarray:
    """Unions and differences of a few boxes and ellipses: what regions of images look like."""
    mask = np.zeros((GRID, GRID), bool)
    for _ in range(draw(st.integers(0, 4))):
        row, column = draw(st.floats(-8, GRID + 8)), draw(st.floats(-8, GRID + 8))
        high, wide = draw(st.floats(1, 40)), draw(st.floats(1, 40))
        down, across = (ROWS - row) / high, (COLUMNS - column) / wide
        shape = (abs(down) < 1) & (abs(across) < 1) if draw(st.booleans()) else down**2 + across**2 < 1
        mask = mask & ~shape if draw(st.booleans()) and draw(st.booleans()) else mask | shape
    return mask


@given(shapes())
def test_a_region_comes_back_as_it_was_within_the_bytes_it_may_take(mask):
    packed = pack_mask(mask)
    assert len(packed) <= LARGEST
    np.testing.assert_array_equal(unpack_mask(packed), mask)


@given(st_numpy.arrays(bool, (GRID, GRID)))
def test_whatever_the_mask_it_stays_within_its_bytes_and_is_exact_unless_stored_coarsely(mask):
    packed = pack_mask(mask)
    assert len(packed) <= LARGEST
    unpacked = unpack_mask(packed)
    coarse = to_grid(mask, GRID // 2).repeat(2, axis=0).repeat(2, axis=1)
    assert (unpacked == mask).all() or (unpacked == coarse).all()


def test_noise_is_stored_coarsely_and_keeps_its_large_features():
    noise = np.random.default_rng(0).random((GRID, GRID)) < np.where(COLUMNS < GRID // 2, 0.1, 0.9)
    packed = pack_mask(noise)
    assert len(packed) == 129
    unpacked = unpack_mask(packed)
    assert unpacked[:, : GRID // 2].mean() < 0.2
    assert unpacked[:, GRID // 2 :].mean() > 0.8


@pytest.mark.parametrize("value", [False, True])
def test_empty_and_full_masks_take_a_handful_of_bytes(value):
    mask = np.full((GRID, GRID), value)
    assert len(pack_mask(mask)) < 12
    assert (unpack_mask(pack_mask(mask)) == mask).all()


def test_several_masks_come_back_in_order():
    masks = np.stack([ROWS < 10, COLUMNS > 20, ROWS + COLUMNS < 50])
    np.testing.assert_array_equal(unpack_masks([pack_mask(mask) for mask in masks]), masks)
    assert unpack_masks([]).shape == (0, GRID, GRID)


@pytest.mark.parametrize("packed", [b"", b"x", b"r", b"rzzzz", b"b\0\0", pack_mask(ROWS < 9)[:-2], b"c\x03\x00"])
def test_bytes_that_are_no_mask_are_told_apart(packed):
    with pytest.raises(ValueError, match="no packed mask"):
        unpack_mask(packed)


def test_a_mask_of_another_size_must_first_be_brought_to_the_grid():
    with pytest.raises(ValueError, match="to_grid"):
        pack_mask(np.zeros((32, 32), bool))


@given(st.integers(1, 200), st.integers(1, 200), st.data())
def test_a_mask_with_a_pixel_has_a_cell_and_one_without_has_none(height, width, data):
    mask = np.zeros((height, width), bool)
    assert not to_grid(mask).any()
    row, column = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    mask[row, column] = True
    cells = to_grid(mask)
    # The cell that holds the middle of the pixel is among them, or a neighbour that holds as much of it.
    covered = np.argwhere(cells)
    assert len(covered)
    expected = np.array([(row + 0.5) * GRID / height, (column + 0.5) * GRID / width])
    assert abs(covered + 0.5 - expected).max(axis=1).min() <= 1 + max(GRID / height, GRID / width)


def test_half_an_image_is_half_of_the_grid_whatever_the_images_size():
    for height, width in ((480, 640), (63, 65), (1000, 31), (5, 7)):
        mask = np.zeros((height, width), bool)
        mask[:, : width // 2] = True
        share = to_grid(mask).mean()
        assert abs(share - mask.mean()) <= 1 / GRID, (height, width)


@given(st.integers(20, 300), st.integers(20, 300))
def test_the_grid_has_no_direction(height, width):
    mask = np.zeros((height, width), bool)
    mask[height // 5 : height // 2, width // 3 :] = True
    np.testing.assert_array_equal(to_grid(mask).T, to_grid(np.ascontiguousarray(mask.T)))
