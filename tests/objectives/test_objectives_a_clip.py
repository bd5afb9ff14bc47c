"""A-CLIP: views, the teacher that chooses their patches, and the three losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_batches import CONFIG, encode, rand, terms_of, tiny_batch, tiny_encoder

from powerclip.encoders import build
from powerclip.errors import UserError
from powerclip.objectives import AClip, AClipSettings
from powerclip.objectives.a_clip import (
    TwoViews,
    byol_loss,
    cover,
    kept_cells,
    resample_scores,
    select_attentive,
    simclr_loss,
    take_crops,
)
from powerclip.objectives.clip import clip_loss


def attached(encoder=None, **settings):
    encoder = encoder or tiny_encoder()
    objective = AClip(AClipSettings(hidden=16, output=8, **settings))
    objective.attach(encoder)
    return encoder, objective.train()


# ---- views -----------------------------------------------------------------------------------------------------------


def test_a_crop_of_whole_pixels_is_those_pixels():
    image = torch.randn(1, 3, 8, 8)
    crop = take_crops(image, torch.tensor([[0.25, 0.5, 0.75, 1.0]]))
    assert crop.shape == image.shape
    expected = F.interpolate(image[:, :, 4:8, 2:6], size=(8, 8), mode="bilinear", align_corners=False)
    torch.testing.assert_close(crop[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1])
    torch.testing.assert_close(take_crops(image, torch.tensor([[0.0, 0.0, 1.0, 1.0]])), image)


def test_the_cover_holds_both_crops():
    one, other = torch.tensor([[0.1, 0.2, 0.8, 0.9]]), torch.tensor([[0.3, 0.0, 1.0, 0.7]])
    assert torch.equal(cover(one, other), torch.tensor([[0.1, 0.0, 1.0, 0.9]]))


# ---- losses ----------------------------------------------------------------------------------------------------------


def literal_simclr(one, other, temperature):
    views = [*one, *other]
    count, total = len(one), 0.0
    for i, view in enumerate(views):
        partner = (i + count) % (2 * count)
        logits = {
            k: F.cosine_similarity(view, another, dim=0) / temperature for k, another in enumerate(views) if k != i
        }
        total = total - logits[partner] + torch.stack(list(logits.values())).logsumexp(0)
    return total / len(views)


def test_simclr_is_the_literal_loss_between_the_two_views():
    one, other = (torch.randn(5, 4, dtype=torch.double).requires_grad_() for _ in range(2))
    results = []
    for function in (simclr_loss, literal_simclr):
        loss = function(one, other, 0.1)
        results.append([loss, *torch.autograd.grad(loss, [one, other])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-4)


def test_the_views_are_compared_with_each_other_and_not_with_themselves():
    one, other = torch.randn(6, 8), torch.randn(6, 8)
    assert simclr_loss(one, other, 0.1) > simclr_loss(one, one, 0.1) + 1


def test_byol_is_the_squared_distance_of_unit_vectors():
    predicted, target = torch.randn(5, 2, 8), torch.randn(5, 8)
    p, t = F.normalize(predicted, dim=-1), F.normalize(target, dim=-1).unsqueeze(1)
    torch.testing.assert_close(byol_loss(predicted, target), (p - t).square().sum(-1).mean())


def test_views_that_are_no_pairs_are_refused():
    with pytest.raises(ValueError, match="are no pairs"):
        simclr_loss(torch.ones(3, 8), torch.ones(2, 8), 0.1)
    with pytest.raises(ValueError, match="do not fit"):
        byol_loss(torch.ones(3, 2, 8), torch.ones(2, 8))


def test_the_total_is_the_weighted_sum_of_all_three():
    encoder, objective = attached()
    batch = tiny_batch(6)
    encoded = encode(objective, encoder, batch)
    terms = objective.loss(encoded, batch)
    one, other = (clip_loss(view, encoded.text, encoded.logit_scale) for view in (encoded.image, encoded.extra.second))
    contrasted, predicted, target = objective.run_heads(encoded.extra)
    contrast = simclr_loss(contrasted[:, 0], contrasted[:, 1], 0.1)
    torch.testing.assert_close(terms.total, (one + other) / 2 + contrast + 2 * byol_loss(predicted, target))
    assert terms.parts.keys() == {"clip", "simclr", "byol"}
    assert isinstance(encoded.extra, TwoViews)
    assert not target.requires_grad
    assert not encoded.extra.teacher_pooled.requires_grad


# ---- the teacher -----------------------------------------------------------------------------------------------------


def test_the_teacher_starts_as_the_tower_and_follows_it_by_its_momentum():
    encoder, objective = attached(momentum=0.9)
    visual = encoder.clip.visual
    before = visual.proj.detach().clone()
    assert torch.equal(objective.teacher.proj, before)
    with torch.no_grad():
        visual.proj += 1
    objective.progress(0, 10)
    objective.after_step(encoder)
    torch.testing.assert_close(objective.teacher.proj, before + 0.1)
    objective.progress(10, 10)
    objective.after_step(encoder)
    torch.testing.assert_close(objective.teacher.proj, before + 0.1)


def test_the_momentum_goes_from_0_996_to_1_along_a_cosine():
    objective = AClip()
    momenta = []
    for step in (0, 5, 10):
        objective.progress(step, 10)
        momenta.append(objective.momentum)
    assert momenta == pytest.approx([0.996, 0.998, 1.0])


def test_the_teacher_is_saved_but_not_optimised():
    encoder, objective = attached()
    names = {name for name, _ in objective.named_parameters() if name.startswith("teacher")}
    assert "teacher.proj" in names
    assert names <= objective.state_dict().keys()
    assert not any(p.requires_grad for name, p in objective.named_parameters() if name in names)
    terms_of(objective, encoder, tiny_batch(6)).total.backward()
    assert all(p.grad is None for name, p in objective.named_parameters() if name in names)
    assert all(p.grad is not None for name, p in objective.named_parameters() if name not in names)


def test_the_patch_embedding_is_frozen_unless_told_otherwise():
    assert not attached()[0].clip.visual.conv1.weight.requires_grad
    assert attached(freeze_patches=False)[0].clip.visual.conv1.weight.requires_grad


def test_the_patches_that_stay_are_those_that_the_teacher_attends_to(monkeypatch):
    encoder, objective = attached(smallest=1.0)  # both views are the whole image
    batch = tiny_batch(3)
    scores = torch.zeros(3, 16)
    scores[:, [2, 3, 6, 7]] = 1.0  # the upper right cell of 2 × 2 patches
    scores[:, [8, 9, 12, 13]] = 0.5  # the lower left one
    monkeypatch.setattr(
        "powerclip.objectives.a_clip.forward_attention", lambda visual, images: (torch.ones(3, 32), scores)
    )
    encoded = encode(objective, encoder, batch)
    assert encoded.kept.tolist() == [[2, 3, 6, 7, 8, 9, 12, 13]] * 3


def test_a_grid_that_does_not_divide_into_cells_is_answered_with_the_setting():
    config = {**CONFIG, "vision_cfg": {**CONFIG["vision_cfg"], "image_size": 24}}
    with pytest.raises(UserError, match=r"3 × 3: set objective_settings\.cell"):
        attached(build(config=config))
    attached(build(config=config), cell=1)


def test_the_features_of_another_objective_are_refused():
    encoder, objective = attached()
    batch = tiny_batch(4)
    with pytest.raises(TypeError, match="its own encode"):
        objective.loss(encoder(batch.images, batch.tokens), batch)


# ---- patches that stay -----------------------------------------------------------------------------------------------


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
    resampled = resample_scores(ramp.flatten().unsqueeze(0), (8, 8), whole, right).view(8, 8)
    middles = 0.5 + 0.4 * (torch.arange(8) + 0.5) / 8
    torch.testing.assert_close(resampled, (middles * 8 - 0.5).repeat(8, 1), atol=1e-4, rtol=0)
