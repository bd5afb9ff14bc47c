"""Ways to choose patches: each does what its description says, patch by patch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cosine_similarity

from powerclip.objectives.selection import (
    anchor_count,
    anchor_similarity,
    balance,
    draw_anchors,
    edge_strength,
    embedding_similarity,
    kept_cells,
    kept_count,
    mask_near,
    pixel_similarity,
    resample_scores,
    search_threshold,
    select_attentive,
    split_patches,
)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# ---- similarity ------------------------------------------------------------------------------------------------------


def test_a_patch_is_its_pixels():
    images = rand(2, 3, 8, 12)
    patches = split_patches(images, (2, 3))
    assert patches.shape == (2, 6, 3 * 4 * 4)
    assert torch.equal(patches[1, 4], images[1, :, 4:8, 4:8].flatten())


def test_pixels_that_no_patch_has_are_an_error_and_not_other_patches():
    with pytest.raises(RuntimeError, match="shape"):
        split_patches(rand(1, 3, 20, 20), (3, 3))


def test_pixel_similarity_is_the_cosine_of_standardised_patches():
    images = rand(1, 3, 8, 8)
    found = pixel_similarity(images, (2, 2))[0]
    patches = [split_patches(images, (2, 2))[0, n] for n in range(4)]
    for i, one in enumerate(patches):
        for j, other in enumerate(patches):
            expected = cosine_similarity(one - one.mean(), other - other.mean(), dim=0)
            assert found[i, j] == pytest.approx(float(expected), abs=1e-5)


def test_brightness_and_contrast_do_not_count_between_patches():
    texture = rand(3, 4, 4)
    image = torch.cat([texture, 0.3 * texture + 2], dim=2).unsqueeze(0)
    assert pixel_similarity(image, (1, 2))[0, 0, 1] == pytest.approx(1, abs=1e-3)


def test_autocast_does_not_coarsen_similarities():
    patches = rand(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = embedding_similarity(patches)
    assert found.dtype == torch.float32
    assert torch.equal(found, embedding_similarity(patches))


# ---- clusters --------------------------------------------------------------------------------------------------------


def test_numbers_of_anchors_and_patches_are_the_papers_on_a_grid_of_14():
    assert anchor_count(196, 0.03) == 6
    assert anchor_count(196, 0.05) == 10
    assert kept_count(196, 0.3) == 137
    assert kept_count(196, 0.5) == 98
    assert anchor_count(4, 0.03) == 1
    assert kept_count(4, 1.0) == 1


def literal_clusters(similarity, anchors, noise, keep, threshold, protected):
    """Which patches each image shows, written out."""
    shown = []
    for c in range(len(similarity)):
        visible, sure = [], []
        for n in range(similarity.shape[1]):
            masked = n in anchors[c] or any(float(similarity[c, a, n]) > threshold for a in anchors[c])
            if protected is not None and protected[c, n]:
                sure.append(n)
            elif not masked:
                visible.append(n)
        ranked = sorted(sure, key=lambda n: float(noise[c, n])) + sorted(visible, key=lambda n: float(noise[c, n]))
        if not ranked:
            ranked = [min(range(similarity.shape[1]), key=lambda n: float(noise[c, n]))]
        shown.append(sorted(ranked[:keep]))
    return shown


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    keep=st.integers(1, 12),
    threshold=st.floats(-1.0, 1.0),
    anchors=st.integers(1, 4),
    edges=st.booleans(),
)
def test_a_patch_that_is_like_an_anchor_goes(seed, keep, threshold, anchors, edges):
    similarity = embedding_similarity(rand(3, 12, 3, seed=seed) - 0.5)
    noise = rand(3, 12, seed=seed + 1)
    protected = rand(3, 12, seed=seed + 2) < 0.3 if edges else None
    drawn = draw_anchors(rand(3, 12, seed=seed + 3), anchors, protected)
    near = anchor_similarity(similarity, drawn, protected)
    found = mask_near(near, noise, keep, threshold=threshold, protected=protected)
    assert found.kept.shape == found.shown.shape == (3, keep)
    assert (found.kept.diff(dim=1) > 0).all()
    expected = literal_clusters(similarity, drawn.tolist(), noise, keep, threshold, protected)
    assert [row[show].tolist() for row, show in zip(found.kept, found.shown, strict=True)] == expected


def test_anchors_are_drawn_among_patches_that_are_not_protected():
    protected = torch.tensor([[True, False, True, False, True, True]])
    anchors = draw_anchors(rand(1, 6), 2, protected)
    assert set(anchors[0].tolist()) == {1, 3}
    assert draw_anchors(rand(1, 6), 3, protected).shape == (1, 3)  # too few others: some protected one has to do


@pytest.mark.parametrize("least", [0, 20, 60])
def test_the_threshold_masks_the_share_that_was_asked_for(least):
    near = rand(50, 200)
    limit = search_threshold(near, least, 0.5)
    masked = (near > limit).sum(1).clamp(min=least).float().mean() / 200
    assert 0.499 < masked <= 0.5


def test_a_share_that_is_masked_anyway_needs_no_threshold():
    near = rand(5, 20)
    limit = search_threshold(near, 15, 0.5)
    assert not (near > limit).any()
    near[:, :12] = float("inf")
    assert (near > search_threshold(near, 0, 0.5)).sum() == 5 * 12


def test_clusters_of_the_whole_batch_are_half_of_it_but_images_differ():
    similarity = pixel_similarity(rand(20, 3, 32, 32), (8, 8))
    near = anchor_similarity(similarity, draw_anchors(rand(20, 64), 2))
    found = mask_near(near, rand(20, 64, seed=1), 64, ratio=0.5)
    shares = found.shown.float().mean(1)
    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert shares.std() > 0.005


# ---- transport -------------------------------------------------------------------------------------------------------


def literal_sinkhorn(similarity, epsilon):
    plan = (similarity.double() / epsilon).exp()
    for _ in range(2000):
        plan = plan / plan.sum(2, keepdim=True)
        plan = plan / plan.sum(1, keepdim=True)
    return plan


@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_a_balanced_similarity_is_sinkhorns_plan(epsilon):
    similarity = embedding_similarity(rand(3, 20, 6) - 0.4)
    plan = balance(similarity, epsilon, iterations=50)
    torch.testing.assert_close(plan.sum(1), torch.ones(3, 20), atol=1e-3, rtol=0)
    torch.testing.assert_close(plan.sum(2), torch.ones(3, 20), atol=1e-3, rtol=0)
    torch.testing.assert_close(plan.double(), literal_sinkhorn(similarity, epsilon), atol=1e-3, rtol=0)


def test_balance_takes_from_the_patch_that_is_like_everything():
    similarity = torch.full((1, 6, 6), 0.1) + 0.9 * torch.eye(6)
    similarity[0, 0, 1:] = similarity[0, 1:, 0] = 0.8  # a hub
    similarity[0, 1, 2] = similarity[0, 2, 1] = 0.8  # and a true pair
    plan = balance(similarity)[0]
    assert plan[1, 2] > 1.1 * plan[1, 0]  # equally similar before


# ---- edges -----------------------------------------------------------------------------------------------------------


def test_edges_are_sobels_of_the_patch_means():
    images = rand(2, 3, 10, 15)
    means = [[float(images[1, :, 2 * r : 2 * r + 2, 3 * c : 3 * c + 3].mean()) for c in range(5)] for r in range(5)]

    def at(r: int, c: int) -> float:
        return means[min(max(r, 0), 4)][min(max(c, 0), 4)]

    raw = []
    for r in range(5):
        for c in range(5):
            across = sum(w * (at(r + d, c + 1) - at(r + d, c - 1)) for d, w in ((-1, 1), (0, 2), (1, 1)))
            down = sum(w * (at(r + 1, c + d) - at(r - 1, c + d)) for d, w in ((-1, 1), (0, 2), (1, 1)))
            raw.append((across**2 + down**2) ** 0.5)
    expected = torch.tensor([(value - min(raw)) / (max(raw) - min(raw)) for value in raw])
    torch.testing.assert_close(edge_strength(images, (5, 5))[1], expected, atol=1e-4, rtol=0)


def test_a_step_is_an_edge_and_the_border_is_none():
    image = torch.zeros(1, 3, 16, 16)
    image[..., 8:] = 1
    found = edge_strength(image, (4, 4))[0].view(4, 4)
    assert (found[:, 1:3] > 0.9).all()
    assert (found[:, [0, 3]] == 0).all()
    assert (edge_strength(torch.ones(1, 3, 16, 16), (4, 4)) == 0).all()


# ---- attention -------------------------------------------------------------------------------------------------------


def test_half_of_the_cells_of_a_grid_of_14_are_100_patches():
    assert kept_cells((14, 14), 0.5, 2) == 25
    assert select_attentive(rand(2, 196), (14, 14)).shape == (2, 100)


def test_the_best_cells_stay_whole():
    scores = rand(3, 24)
    kept = select_attentive(scores, (4, 6), keep=0.5, cell=2)
    assert kept.shape == (3, 12)
    assert (kept.diff(dim=1) > 0).all()
    for c in range(3):
        cells = {
            (r, k): sum(float(scores[c, (2 * r + y) * 6 + 2 * k + x]) for y in (0, 1) for x in (0, 1))
            for r in range(2)
            for k in range(3)
        }
        best = sorted(cells, key=lambda cell: cells[cell])[-3:]
        expected = {(2 * r + y) * 6 + 2 * k + x for r, k in best for y in (0, 1) for x in (0, 1)}
        assert set(kept[c].tolist()) == expected


def test_scores_stay_where_they_are_when_the_crop_is_the_same():
    scores, crop = rand(2, 24), torch.tensor([[0.1, 0.2, 0.7, 0.9]]).expand(2, -1)
    torch.testing.assert_close(resample_scores(scores, (4, 6), crop, crop), scores)


def test_scores_move_with_the_crop():
    ramp = torch.arange(8.0).repeat(8, 1)  # column c of 8 over the whole image: its middle is at (c + ½) / 8
    whole, right = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([[0.5, 0.25, 0.9, 0.75]])
    found = resample_scores(ramp.flatten().unsqueeze(0), (8, 8), whole, right).view(8, 8)
    middles = 0.5 + 0.4 * (torch.arange(8) + 0.5) / 8
    torch.testing.assert_close(found, (middles * 8 - 0.5).repeat(8, 1), atol=1e-4, rtol=0)
