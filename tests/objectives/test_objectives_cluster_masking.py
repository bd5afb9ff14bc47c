"""Cluster masking: similar patches go together, as many as were asked for; E-CLIP, which masks by them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_batches import encode, larger_encoder, noise_images, planned, rand, tiny_batch, tiny_encoder, visible
from torch.nn.functional import cosine_similarity

from powerclip.objectives import ClipPgs, EClip, EClipSettings, build_objective
from powerclip.objectives.cluster_masking import (
    anchor_count,
    anchor_similarity,
    draw_anchors,
    embedding_similarity,
    kept_count,
    mask_near,
    pixel_similarity,
    search_threshold,
    split_patches,
)

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
    similarity = pixel_similarity(images, (2, 2))[0]
    patches = [split_patches(images, (2, 2))[0, n] for n in range(4)]
    for i, one in enumerate(patches):
        for j, other in enumerate(patches):
            expected = cosine_similarity(one - one.mean(), other - other.mean(), dim=0)
            assert similarity[i, j] == pytest.approx(float(expected), abs=1e-5)


def test_brightness_and_contrast_do_not_count_between_patches():
    texture = rand(3, 4, 4)
    image = torch.cat([texture, 0.3 * texture + 2], dim=2).unsqueeze(0)
    assert pixel_similarity(image, (1, 2))[0, 0, 1] == pytest.approx(1, abs=1e-3)


def test_autocast_does_not_coarsen_similarities():
    patches = rand(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        similarity = embedding_similarity(patches)
    assert similarity.dtype == torch.float32
    assert torch.equal(similarity, embedding_similarity(patches))


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
    selection = mask_near(near, noise, keep, threshold=threshold, protected=protected)
    assert selection.kept.shape == selection.shown.shape == (3, keep)
    assert (selection.kept.diff(dim=1) > 0).all()
    expected = literal_clusters(similarity, drawn.tolist(), noise, keep, threshold, protected)
    assert [row[show].tolist() for row, show in zip(selection.kept, selection.shown, strict=True)] == expected


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
    selection = mask_near(near, rand(20, 64, seed=1), 64, ratio=0.5)
    shares = selection.shown.float().mean(1)
    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert shares.std() > 0.005


# ---- objectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("flip", 8), ("e_clip", 11), ("clip_pgs", 11), ("a_clip", 8)])
def test_the_transformer_gets_fewer_patches(name, most):
    encoder, batch = tiny_encoder(), tiny_batch(6)
    objective = build_objective(name, settings={"hidden": 8} if name == "a_clip" else {})
    objective.attach(encoder)
    lengths = []
    encoder.clip.visual.transformer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    encoded = encode(objective, encoder, batch)
    assert lengths == [1 + most]  # of 16
    assert encoded.kept.shape == (6, most)
    terms = objective.loss(encoded, batch)
    terms.total.backward()
    assert encoder.clip.visual.proj.grad.isfinite().all()


@pytest.mark.parametrize("objective", [EClip(EClipSettings(embedding=True)), ClipPgs()], ids=["e_clip", "clip_pgs"])
def test_similarities_take_no_gradient(monkeypatch, objective):
    score_patches, near = objective.score_patches, []

    def watched(*arguments):
        near.append(score_patches(*arguments)[0])
        return score_patches(*arguments)

    monkeypatch.setattr(objective, "score_patches", watched)
    planned(objective, noise_images(4).requires_grad_())
    assert len(near) == 1
    assert not near[0].requires_grad


def test_e_clip_masks_by_pixels_unless_told_otherwise():
    objective = EClip()
    objective.progress(9, 10)
    one, other = (visible(planned(objective, noise_images(), larger_encoder(seed))) for seed in (0, 1))
    assert one == other


def test_e_clip_moves_from_pixels_to_embeddings_when_told_so():
    objective = EClip(EClipSettings(embedding=True))
    expected = visible(planned(EClip(), noise_images()))
    shown = []
    for step in (0, 10):
        objective.progress(step, 10)
        shown.append(visible(planned(objective, noise_images())))
    assert shown[0] == expected
    assert shown[1] != expected


def test_e_clip_masks_half_of_all_patches_and_a_third_of_each_image():
    plan = planned(EClip(EClipSettings(least=0.3)), noise_images(40))
    assert plan.kept.shape == (40, 44)
    assert plan.shown.float().sum() / (40 * 64) == pytest.approx(0.5, abs=0.01)


def test_a_fixed_threshold_replaces_the_search():
    assert planned(EClip(EClipSettings(threshold=1.1)), noise_images()).shown.all()
    # Everything is masked: one patch is shown all the same.
    assert (planned(EClip(EClipSettings(threshold=-1.1)), noise_images()).shown.sum(1) == 1).all()
