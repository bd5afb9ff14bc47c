"""PowerCLIP's objective: CLIP's loss plus the weighted alignment, and a scale where there is one to learn."""

from __future__ import annotations

import pytest
import torch
from tiny_batches import encode, features, terms_of, tiny_batch, tiny_encoder, tiny_loader

from powerclip.alignment.config import AlignmentConfig
from powerclip.alignment.embed import embed_parts
from powerclip.alignment.loss import alignment_loss
from powerclip.objectives import Clip, PowerClip, build_objective
from powerclip.objectives.clip import clip_loss


@pytest.mark.parametrize("weight", [0.0, 0.3, 2.0])
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_the_total_is_clip_plus_the_weighted_alignment(preset, weight):
    config = AlignmentConfig.named(preset, weight=weight)
    objective, encoded, batch = PowerClip(config), features(6), tiny_batch(6)
    terms = objective.loss(encoded, batch)
    parts = embed_parts(encoded.patches, batch.regions, encoded.words, batch.phrases, config)
    scale = None if objective.log_scale is None else objective.log_scale.exp()
    align = alignment_loss(parts, config, scale).loss
    clip = clip_loss(encoded.image, encoded.text, encoded.logit_scale)
    assert torch.allclose(terms.parts["clip"], clip)
    assert torch.allclose(terms.parts["alignment"], align)
    assert torch.allclose(terms.total, clip + weight * align)
    assert not any(part.requires_grad for part in terms.parts.values())


def test_the_gradient_reaches_global_and_dense_features():
    encoded = features(6)
    inputs = [encoded.patches, encoded.words, encoded.image, encoded.text, encoded.logit_scale]
    gradients = torch.autograd.grad(PowerClip().loss(encoded, tiny_batch(6)).total, inputs)
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
    encoded, batch, objective = features(6), tiny_batch(6), PowerClip()
    plain = objective.loss(encoded, batch).parts["alignment"]
    with torch.autocast("cpu", torch.bfloat16):
        cast = objective.loss(encoded, batch).parts["alignment"]
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("name", ["clip", "powerclip"])
def test_the_loss_falls_on_scenes_it_has_not_seen(name):
    encoder, objective = tiny_encoder(), build_objective(name)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *objective.parameters()], lr=3e-3)
    totals = []
    for step in range(30):
        terms = terms_of(objective, encoder, tiny_loader(32).batch(step))
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
        objective.clamp()
        totals.append(terms.parts)
    for part in ("clip", "alignment") if name == "powerclip" else ("clip",):
        before, after = (sum(float(parts[part]) for parts in window) / 5 for window in (totals[:5], totals[-5:]))
        assert after < 0.9 * before, part


def test_a_weight_of_zero_leaves_clips_gradients():
    batch = tiny_batch(6)
    gradients = []
    for objective in (Clip(), PowerClip(AlignmentConfig.named(weight=0.0))):
        encoder = tiny_encoder()
        terms_of(objective, encoder, batch).total.backward()
        gradients.append([p.grad for p in encoder.parameters() if p.grad is not None])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*gradients, strict=True))


# ---- when, where and in which space it learns ------------------------------------------------------------------------


def test_the_weight_rises_over_its_share_of_the_run_and_stays():
    encoded, batch = features(6), tiny_batch(6)
    full = PowerClip(AlignmentConfig(weight=0.8)).loss(encoded, batch)
    objective = PowerClip(AlignmentConfig(weight=0.8, ramp=0.25))
    for step, share in ((0, 0.0), (5, 0.2), (20, 0.8), (25, 1.0), (60, 1.0)):
        objective.progress(step, 100)
        terms = objective.loss(encoded, batch)
        assert terms.parts["weight"].item() == pytest.approx(0.8 * share)
        torch.testing.assert_close(terms.total, full.parts["clip"] + share * 0.8 * full.parts["alignment"])


@pytest.mark.parametrize(("trains", "learns"), [("image", "patches"), ("text", "words")])
def test_one_towers_dense_features_learn_as_they_do_with_both_and_the_others_do_not(trains, learns):
    encoded, batch = features(6), tiny_batch(6)
    both = PowerClip().loss(encoded, batch).total
    one = PowerClip(AlignmentConfig(trains=trains)).loss(encoded, batch).total
    assert torch.equal(one, both)
    inputs = {"patches": encoded.patches, "words": encoded.words}
    expected = dict(zip(inputs, torch.autograd.grad(both, list(inputs.values())), strict=True))
    gradients = dict(zip(inputs, torch.autograd.grad(one, list(inputs.values()), allow_unused=True), strict=True))
    torch.testing.assert_close(gradients.pop(learns), expected[learns])
    assert list(gradients.values()) == [None]


def test_separate_projections_start_as_shared_ones_and_are_matrices_of_patches_and_words():
    encoder, batch = tiny_encoder(), tiny_batch(6)
    shared, separate = PowerClip(), PowerClip(AlignmentConfig(projection="separate"))
    separate.attach(encoder)
    names = {name: tuple(p.shape) for name, p in separate.named_parameters()}
    assert names == {"log_scale": (), "projections.patches": (32, 32), "projections.words": (32, 32)}
    torch.testing.assert_close(terms_of(separate, encoder, batch).total, terms_of(shared, encoder, batch).total)
    with torch.no_grad():
        for matrix in separate.projections.values():
            matrix.add_(0.3 * torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
    encoded = encode(separate, encoder, batch)
    patches, words = (getattr(encoded, side) @ separate.projections[side] for side in ("patches", "words"))
    parts = embed_parts(patches, batch.regions, words, batch.phrases, separate.config)
    expected = alignment_loss(parts, separate.config, separate.log_scale.exp()).loss
    terms = separate.loss(encoded, batch)
    torch.testing.assert_close(terms.parts["alignment"], expected.detach())
    torch.testing.assert_close(terms.parts["clip"], terms_of(shared, encoder, batch).parts["clip"])
    terms.total.backward()
    assert all(p.grad.abs().sum() > 0 for p in separate.parameters())


def test_separate_projections_are_saved_and_must_be_attached():
    config = AlignmentConfig(projection="separate")
    one, other = PowerClip(config), PowerClip(config)
    with pytest.raises(ValueError, match="attach"):
        one.loss(features(6), tiny_batch(6))
    for objective in (one, other):
        objective.attach(tiny_encoder())
    with torch.no_grad():
        one.projections["words"].mul_(2)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.projections["words"], 2 * torch.eye(32))


def test_annealed_negatives_follow_the_run():
    encoded, batch = features(6), tiny_batch(6)
    annealed = PowerClip(AlignmentConfig(negatives="k", anneal=True))
    for step, k in ((0, 5), (50, 2), (99, 1)):
        annealed.progress(step, 100)
        terms = annealed.loss(encoded, batch)
        fixed = PowerClip(AlignmentConfig(negatives="k", k=k)).loss(encoded, batch)
        assert terms.parts["k"].item() == k
        torch.testing.assert_close(terms.total, fixed.total)


def test_what_is_logged_by_default_has_neither_weight_nor_k():
    parts = PowerClip().loss(features(6), tiny_batch(6)).parts
    assert not parts.keys() & {"weight", "k"}
