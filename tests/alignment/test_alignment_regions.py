"""Regions: random boxes and Eqs. 1 and 2."""

import pytest
import torch

from powerclip.alignment import embed_regions, random_boxes
from powerclip.alignment.regions import embed_region_sets, subset_matrix


def boxes(count: int = 200, regions: int = 10, grid: tuple[int, int] = (7, 5), seed: int = 0) -> torch.Tensor:
    return random_boxes(count, regions, grid, torch.Generator().manual_seed(seed))


def test_random_boxes_are_never_empty_and_always_rectangles():
    masks = boxes().view(-1, 7, 5)
    rows, columns = masks.any(2), masks.any(1)
    assert masks.flatten(1).any(1).all()
    assert torch.equal(masks, rows.unsqueeze(2) & columns.unsqueeze(1))
    for spans in (rows, columns):  # contiguous: at most one step up and one step down
        steps = torch.nn.functional.pad(spans.int(), (1, 1)).diff().abs().sum(1)
        assert (steps == 2).all()


def test_random_boxes_reach_every_patch_and_every_size():
    masks = boxes(count=500).view(-1, 7, 5)
    assert masks.any(0).all()
    heights = masks.any(2).sum(1)
    assert set(heights.tolist()) == set(range(1, 8))


def test_random_boxes_follow_their_generator():
    assert torch.equal(boxes(seed=3), boxes(seed=3))
    assert not torch.equal(boxes(seed=3), boxes(seed=4))


def test_a_region_is_the_normalised_sum_of_its_patches():
    masks = boxes(count=3, regions=4)
    patches = torch.randn(3, 35, 8, generator=torch.Generator().manual_seed(0))
    embedded = embed_regions(patches, masks)
    for image in range(3):
        for region in range(4):
            total = patches[image][masks[image, region]].sum(0)
            torch.testing.assert_close(embedded[image, region], total / total.norm())


def test_a_set_is_the_sum_of_its_members_and_the_empty_set_is_zero():
    regions = torch.randn(2, 3, 8)
    sets = embed_region_sets(regions)
    assert sets.shape == (2, 8, 8)
    assert (sets[:, 0] == 0).all()
    torch.testing.assert_close(sets[:, 5], regions[:, 0] + regions[:, 2])  # 5 = 0b101
    assert torch.equal(embed_region_sets(regions, empty=False), sets[:, 1:])


def test_the_subset_matrix_lists_every_set_once():
    rows = {tuple(row) for row in subset_matrix(5).tolist()}
    assert len(rows) == 32
    assert len(subset_matrix(5, empty=False)) == 31


def test_sets_of_too_many_regions_are_not_enumerated():
    with pytest.raises(ValueError, match="at most 16"):
        subset_matrix(17)
