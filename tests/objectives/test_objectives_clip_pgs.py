"""CLIP-PGS: balanced similarities, edges that are spared, and what is masked by both."""

from __future__ import annotations

import pytest
import torch
from tiny_batches import GRID, larger_encoder, noise_images, planned, rand, visible

from powerclip.encoders.vision import embed_image
from powerclip.objectives import ClipPgs, ClipPgsSettings
from powerclip.objectives.clip_pgs import balance, edge_strength
from powerclip.objectives.cluster_masking import embedding_similarity, pixel_similarity


def test_clip_pgs_never_masks_an_edge():
    images = noise_images(20)
    plan = planned(ClipPgs(), images)
    edges = edge_strength(images, GRID) > 0.5
    assert edges.any(1).all()
    for shown, strong in zip(visible(plan), edges, strict=True):
        assert set(strong.nonzero().flatten().tolist()) <= shown


@pytest.mark.parametrize(("least", "most"), [(0.3, 44), (0.5, 32)])
def test_clip_pgs_has_two_variants(least, most):
    plan = planned(ClipPgs(ClipPgsSettings(least=least)), noise_images())
    assert plan.kept.shape == (6, most)
    assert (plan.shown.sum(1) <= most).all()


def test_clip_pgs_masks_by_the_balanced_mixture():
    images, encoder, objective = noise_images(), larger_encoder(), ClipPgs(ClipPgsSettings(edge=1.0, least=0.0))
    objective.progress(3, 10)
    shown = visible(planned(objective, images, encoder))
    drawn = torch.rand(6, 2, 64, generator=torch.Generator().manual_seed(0))
    anchors = drawn[:, 0].argsort(1)[:, :4]  # 5 % of 64
    _, patches = embed_image(encoder.clip.visual, images)
    mixture = 0.3 * embedding_similarity(patches) + 0.7 * pixel_similarity(images, GRID)
    plan = balance(mixture)
    near = torch.stack([plan[c, anchors[c]].amax(0).scatter(0, anchors[c], 9.0) for c in range(6)])
    limit = near.flatten().sort().values[6 * 32 - 1]  # half of all patches lie above
    assert shown == [set((row <= limit).nonzero().flatten().tolist()) for row in near]


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
    strength = edge_strength(image, (4, 4))[0].view(4, 4)
    assert (strength[:, 1:3] > 0.9).all()
    assert (strength[:, [0, 3]] == 0).all()
    assert (edge_strength(torch.ones(1, 3, 16, 16), (4, 4)) == 0).all()
