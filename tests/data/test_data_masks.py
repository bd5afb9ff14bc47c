"""Masks follow their image through its crop: what is drawn on the image lies under the same patches afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from shard_examples import block, encoded

from powerclip.data.decode import decode_crop
from powerclip.data.mask_codec import GRID, pack_mask
from powerclip.data.masks import choose_regions, overlap

WHOLE = (0.0, 0.0, 1.0, 1.0)


@st.composite
def shapes(draw) -> np.ndarray:
    """Ellipses and blocks, one or several."""
    rows, columns = np.mgrid[:GRID, :GRID]
    mask = np.zeros((GRID, GRID), np.bool_)
    for _ in range(draw(st.integers(1, 3))):
        y, x, height, width = (draw(st.integers(2, GRID - 2)) for _ in range(4))
        if draw(st.booleans()):
            mask |= ((rows - y) / height) ** 2 + ((columns - x) / width) ** 2 < 0.5
        else:
            mask[y : y + height, x : x + width] = True
    return mask


@given(shapes(), st.sampled_from([(128, 128), (256, 128), (128, 192)]), st.floats(0.1, 1.0), st.integers(0, 2**62))
@settings(max_examples=60, deadline=None)
def test_a_mask_drawn_on_the_image_lands_on_the_same_pixels_after_the_crop(mask, shape, smallest, key):
    width, height = shape
    drawn = mask.repeat(height // GRID, 0).repeat(width // GRID, 1)
    grid, patch = (7, 5), 16
    crop = decode_crop(
        encoded(Image.fromarray(drawn.astype(np.uint8) * 255)), (grid[0] * patch, grid[1] * patch), smallest, key
    )
    seen = crop.pixels[..., 0].float().unfold(0, patch, patch).unfold(1, patch, patch).mean((2, 3)).flatten() / 255
    assume(seen.max() > 0.6)  # else it is the most covered patch, see below
    regions = choose_regions([pack_mask(mask)], 1, crop.box, grid, 0)
    assert regions.shape == (1, 35)
    sure = (seen - 0.5).abs() > 0.08  # a patch that is half covered may fall to either side
    assert np.array_equal(regions[0][sure.numpy()], (seen > 0.5)[sure].numpy())


def test_a_mask_too_small_for_any_patch_is_the_patch_that_it_covers_most():
    small = block(0.3, 0.6, 0.35, 0.65)
    (region,) = choose_regions([pack_mask(small)], 1, WHOLE, (2, 2), 0)
    assert region.tolist() == [False, False, True, False]


def test_a_mask_that_the_crop_empties_is_drawn_again():
    left, right = block(0, 0, 0.25, 1), block(0.75, 0, 1, 1)
    packed = [pack_mask(left)] * 9 + [pack_mask(right)]
    for key in range(10):
        (region,) = choose_regions(packed, 1, (0.5, 0.0, 1.0, 1.0), (2, 2), key)
        assert region.tolist() == [False, True, False, True]
    assert choose_regions(packed[:9], 3, (0.5, 0.0, 1.0, 1.0), (2, 2), 0).shape == (0, 4)


def test_masks_are_drawn_without_repetition_and_all_in_time():
    packed = [pack_mask(block(column / 4, 0, (column + 1) / 4, 1)) for column in range(4)]
    drawn = [choose_regions(packed, 2, WHOLE, (1, 4), key) for key in range(40)]
    assert all(len(np.unique(regions, axis=0)) == 2 for regions in drawn)
    assert len({row.tobytes() for regions in drawn for row in regions}) == 4
    assert choose_regions(packed, 9, WHOLE, (1, 4), 0).shape == (4, 4)
    assert choose_regions([], 9, WHOLE, (1, 4), 0).shape == (0, 4)


@given(st.floats(0, 0.9), st.floats(0.05, 1.0), st.integers(1, 20))
def test_overlaps_share_out_every_cell_of_a_crop(start, length, cells):
    rows = overlap(start, min(start + length, 1.0), cells)
    assert rows.shape == (cells, GRID)
    assert rows.min() >= 0
    assert np.allclose(rows.sum(1), 1, atol=1e-4)


def test_bytes_that_are_no_mask_are_an_error():
    with pytest.raises(ValueError, match="no packed mask"):
        choose_regions([b"?"], 1, WHOLE, (2, 2), 0)
