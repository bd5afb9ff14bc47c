"""Regions: random boxes and Eqs. 1 and 2."""

import pytest
import torch
import torch.nn.functional as F

from powerclip.alignment import embed_regions, random_boxes
from powerclip.alignment.pooling import normalise
from powerclip.alignment.regions import draw_boxes, embed_region_sets, partition_of, regions_of, subset_matrix


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


@pytest.mark.parametrize(
    ("grid", "regions"), [((7, 5), 10), ((8, 8), 16), ((1, 6), 6), ((5, 1), 2), ((3, 3), 1), ((2, 2), 4)]
)
def test_a_partition_covers_every_patch_once_with_rectangles(grid: tuple[int, int], regions: int):
    masks = partition_of(draw_boxes(300, regions, torch.Generator().manual_seed(0)), grid)
    assert (masks.sum(1) == 1).all()
    boxes = masks.view(-1, *grid)
    assert boxes.flatten(1).any(1).all()
    assert torch.equal(boxes, boxes.any(2).unsqueeze(2) & boxes.any(1).unsqueeze(1))


def test_partitions_cut_everywhere_both_ways_and_large_boxes_first():
    halves = partition_of(draw_boxes(2000, 2, torch.Generator().manual_seed(0)), (4, 3))[:, 0].view(-1, 4, 3)
    heights, widths = halves.any(2).sum(1), halves.any(1).sum(1)
    cuts = torch.stack([(widths == 3) & (heights == row) for row in (1, 2, 3)] + [widths == 1, widths == 2])
    # Three lines of three edges and two of four: each edge is as likely as any other.
    assert torch.allclose(cuts.double().mean(1), torch.tensor([3, 3, 3, 4, 4]).double() / 17, atol=0.03)
    areas = partition_of(draw_boxes(500, 10, torch.Generator().manual_seed(0)), (8, 8)).sum(-1)
    assert areas.amax(1).double().mean() < 3 * 64 / 10


def test_more_regions_than_patches_are_single_patches():
    masks = partition_of(draw_boxes(50, 7, torch.Generator().manual_seed(0)), (2, 2))
    assert (masks.sum(-1) == 1).all()
    assert masks.any(1).all()


def test_regions_are_drawn_by_their_kind_from_the_same_numbers():
    draws = draw_boxes(20, 6, torch.Generator().manual_seed(0))
    assert torch.equal(
        regions_of(draws, (6, 6), "random", 0.5), random_boxes(20, 6, (6, 6), torch.Generator().manual_seed(0), 0.5)
    )
    assert torch.equal(regions_of(draws, (6, 6), "partition"), partition_of(draws, (6, 6)))


def test_a_region_is_the_normalised_sum_of_its_patches():
    masks = boxes(count=3, regions=4)
    patches = torch.randn(3, 35, 8, generator=torch.Generator().manual_seed(0))
    embedded = embed_regions(patches, masks)
    for image in range(3):
        for region in range(4):
            total = patches[image][masks[image, region]].sum(0)
            torch.testing.assert_close(embedded[image, region], total / total.norm())


@pytest.mark.parametrize(("centre", "over"), [("batch", (0, 1)), ("image", 1)])
def test_a_centred_region_is_the_region_of_patches_less_their_mean(centre, over):
    masks = boxes(count=3, regions=4)
    patches = torch.randn(3, 35, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    ours = embed_regions(patches, masks, centre)
    less = patches - patches.mean(over, keepdim=True)
    theirs = F.normalize(masks.float() @ less, dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    one, other = (torch.autograd.grad((weight * regions).sum(), patches) for regions in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_region_that_covers_the_image_is_zero_less_the_mean_of_the_image(dtype):
    masks = boxes(count=3, regions=4)
    masks[0, 1] = masks[2, 3] = True
    whole = masks.all(-1)
    patches = (5 + torch.randn(3, 35, 8, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    embedded = embed_regions(patches, masks, "image")
    assert (embedded[whole] == 0).all()
    torch.testing.assert_close(embedded[~whole].norm(dim=-1), torch.ones(10))
    (gradient,) = torch.autograd.grad(embedded[whole].sum(), patches)
    assert (gradient == 0).all()
    for centre in ("none", "batch"):
        torch.testing.assert_close(embed_regions(patches, masks, centre).norm(dim=-1), torch.ones(3, 4))


def test_bf16_patches_are_summed_in_float32_and_get_a_bf16_gradient():
    masks = boxes(count=3, regions=4)
    patches = torch.randn(3, 35, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    embedded = embed_regions(patches, masks, "batch")
    torch.testing.assert_close(embedded, embed_regions(patches.float(), masks, "batch"))
    (gradient,) = torch.autograd.grad(embedded.sum(), patches)
    assert gradient.dtype == torch.bfloat16


def test_normalise_is_that_of_torch_for_zeros_too():
    vectors = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vectors[2] = 0.0
    weight = torch.randn(5, 8, dtype=torch.float64)
    vectors.requires_grad_()
    torch.testing.assert_close(normalise(vectors), F.normalize(vectors, dim=-1))
    one, other = (torch.autograd.grad((weight * f(vectors)).sum(), vectors) for f in (normalise, F.normalize))
    torch.testing.assert_close(one, other)


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
