"""PowerCLIP's objective: CLIP's loss plus the weighted alignment, and a scale where there is one to learn."""

from __future__ import annotations

import pytest
import torch
from tiny_batches import features, tiny_batch, tiny_encoder, tiny_loader

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.embed import embed_parts
from powerclip.alignment.loss import alignment_loss
from powerclip.objectives import Clip, PowerClip, build_objective
from powerclip.objectives.clip import clip_loss


@pytest.mark.parametrize("weight", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_the_total_is_clip_plus_the_weighted_alignment(preset, weight):
    config = AlignmentConfig.named(preset, weight=weight)
    objective, found, batch = PowerClip(config), features(6), tiny_batch(6)
    terms = objective.loss(found, batch)
    parts = embed_parts(found.patches, batch.regions, found.words, batch.phrases, config)
    scale = None if objective.log_scale is None else objective.log_scale.exp()
    align = alignment_loss(parts, config, scale).loss
    clip = clip_loss(found.image, found.text, found.logit_scale)
    assert torch.allclose(terms.parts["clip"], clip)
    assert torch.allclose(terms.parts["alignment"], align)
    assert torch.allclose(terms.total, clip + weight * align)
    assert not any(part.requires_grad for part in terms.parts.values())


def test_the_gradient_reaches_global_and_dense_features():
    found = features(6)
    inputs = [found.patches, found.words, found.image, found.text, found.logit_scale]
    gradients = torch.autograd.grad(PowerClip().loss(found, tiny_batch(6)).total, inputs)
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)


def test_only_the_softmax_has_a_scale_to_learn():
    softmax = PowerClip(AlignmentConfig.named(loss="softmax", scale=20.0))
    assert softmax.log_scale.exp().item() == pytest.approx(20)
    assert [name for name, _ in softmax.named_parameters()] == ["log_scale"]
    assert list(PowerClip(AlignmentConfig.named("paper")).parameters()) == []
    terms = softmax.loss(features(6), tiny_batch(6))
    assert terms.parts["alignment_scale"].item() == pytest.approx(20)
    (gradient,) = torch.autograd.grad(terms.total, [softmax.log_scale])
    assert gradient.abs() > 0


def test_the_scale_is_kept_at_one_hundred_or_below():
    objective = PowerClip()
    with torch.no_grad():
        objective.log_scale.fill_(7.0)
    objective.clamp()
    assert objective.log_scale.exp().item() == pytest.approx(100)
    PowerClip(AlignmentConfig.named("paper")).clamp()  # nothing to clamp


def test_autocast_around_the_loss_does_not_reach_the_alignment():
    found, batch, objective = features(6), tiny_batch(6), PowerClip()
    plain = objective.loss(found, batch).parts["alignment"]
    with torch.autocast("cpu", torch.bfloat16):
        cast = objective.loss(found, batch).parts["alignment"]
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("name", ["clip", "powerclip"])
def test_the_loss_falls_on_scenes_it_has_not_seen(name):
    encoder, objective = tiny_encoder(), build_objective(name)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *objective.parameters()], lr=3e-3)
    totals = []
    for step in range(30):
        terms = objective(encoder, tiny_loader(32).batch(step))
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
        objective.clamp()
        totals.append(terms.parts)
    for part in ("clip", "alignment") if name == "powerclip" else ("clip",):
        before, after = (sum(float(parts[part]) for parts in some) / 5 for some in (totals[:5], totals[-5:]))
        assert after < 0.9 * before, part


def test_a_weight_of_zero_leaves_clips_gradients():
    batch = tiny_batch(6)
    gradients = []
    for objective in (Clip(), PowerClip(AlignmentConfig.named(weight=0.0))):
        encoder = tiny_encoder()
        objective(encoder, batch).total.backward()
        gradients.append([p.grad for p in encoder.parameters() if p.grad is not None])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))
