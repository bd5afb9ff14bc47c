"""Masks follow their image through its crop: what is drawn on the image lies under the same patches afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from shard_examples import block, encoded

from powerclip.data.decode import decode_crop
from powerclip.data.mask_codec import GRID, pack_mask
from powerclip.data.masks import choose_regions, overlaps

WHOLE = (0.0, 0.0, 1.0, 1.0)


def regions_of(packed: list[bytes], count: int, box: tuple[float, ...], grid: tuple[int, int]) -> torch.Tensor:
    """The regions of one image."""
    (regions,) = choose_regions([packed], torch.tensor([box], dtype=torch.float64), count, grid)
    return regions


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
    regions = regions_of([pack_mask(mask)], 1, crop.box, grid)
    assert regions.shape == (1, 35)
    sure = (seen - 0.5).abs() > 0.08  # a patch that is half covered may fall to either side
    assert torch.equal(regions[0][sure], (seen > 0.5)[sure])


def test_a_mask_too_small_for_any_patch_is_the_patch_that_it_covers_most():
    small = block(0.3, 0.6, 0.35, 0.65)
    (region,) = regions_of([pack_mask(small)], 1, WHOLE, (2, 2))
    assert region.tolist() == [False, False, True, False]


def test_a_mask_that_the_crop_empties_gives_way_to_the_next():
    left, right = pack_mask(block(0, 0, 0.25, 1)), pack_mask(block(0.75, 0, 1, 1))
    half = (0.5, 0.0, 1.0, 1.0)
    (region,) = regions_of([left] * 9 + [right], 1, half, (2, 2))
    assert region.tolist() == [False, True, False, True]
    assert regions_of([left] * 9, 3, half, (2, 2)).shape == (0, 4)


def test_masks_are_taken_in_their_order_until_there_are_enough():
    packed = [pack_mask(block(column / 4, 0, (column + 1) / 4, 1)) for column in range(4)]
    assert regions_of(packed[::-1], 2, WHOLE, (1, 4)).int().tolist() == [[0, 0, 0, 1], [0, 0, 1, 0]]
    assert regions_of(packed, 9, WHOLE, (1, 4)).shape == (4, 4)
    assert regions_of([], 9, WHOLE, (1, 4)).shape == (0, 4)


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_the_masks_of_a_batch_are_those_of_its_images(at_once, monkeypatch):
    monkeypatch.setattr("powerclip.data.masks._IMAGES_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, 0.8, (7, 6, 2))
    listed = [
        [pack_mask(block(x, y, x + 0.2, y + 0.2)) for x, y in one[: 1 + number]] for number, one in enumerate(corners)
    ]
    boxes = [(x, y, x + 0.5, y + 0.5) for x, y in rng.uniform(0, 0.5, (7, 2))]
    together = choose_regions(listed, torch.tensor(boxes, dtype=torch.float64), 3, (4, 4))
    assert len({len(regions) for regions in together}) > 2
    for packed, box, regions in zip(listed, boxes, together, strict=True):
        assert torch.equal(regions, regions_of(packed, 3, box, (4, 4)))


@given(st.floats(0, 0.9), st.floats(0.05, 1.0), st.integers(1, 20))
def test_overlaps_share_out_every_cell_of_a_crop(start, length, cells):
    edges = torch.tensor([[start], [min(start + length, 1.0)]], dtype=torch.float64)
    (rows,) = overlaps(*edges, cells)
    assert rows.shape == (cells, GRID)
    assert rows.min() >= 0
    torch.testing.assert_close(rows.sum(1), torch.ones(cells, dtype=torch.float64))


def test_an_image_with_bytes_that_are_no_mask_has_none_and_the_others_have_theirs():
    good = pack_mask(block(0, 0, 0.5, 1))
    whole = torch.tensor([WHOLE] * 3, dtype=torch.float64)
    first, broken, last = choose_regions([[good], [good, b"?"], [good]], whole, 2, (1, 2))
    assert broken is None
    assert first.tolist() == last.tolist() == [[True, False]]
