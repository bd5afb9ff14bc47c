"""FLIP, E-CLIP and CLIP-PGS: CLIP's loss of fewer patches, and the schedules that go with it."""

from __future__ import annotations

import pytest
import torch
from tiny_batches import CONFIG, encode, terms_of, tiny_batch, tiny_encoder

from powerclip.encoders import DualEncoder, build
from powerclip.encoders.vision import embed_image
from powerclip.objectives import (
    Clip,
    ClipPgs,
    ClipPgsSettings,
    EClip,
    EClipSettings,
    Flip,
    FlipSettings,
    Phase,
    Plan,
    build_objective,
)
from powerclip.objectives.masked import MaskedClip
from powerclip.objectives.selection import balance, edge_strength, embedding_similarity, pixel_similarity
from powerclip.train.towers import Towers

GRID = (8, 8)


def tower(seed: int = 0) -> DualEncoder:
    """An encoder with GRID patches."""
    torch.manual_seed(seed)
    return build(config={**CONFIG, "vision_cfg": {**CONFIG["vision_cfg"], "image_size": 64}}).train()


def pictures(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def planned(objective: MaskedClip, images: torch.Tensor, encoder: DualEncoder | None = None) -> Plan:
    """What the objective does with images; the same is drawn each time."""
    encoder = encoder or tower()
    return Towers(objective, encoder).plan(images, torch.Generator().manual_seed(0))


def visible(plan: Plan) -> list[set[int]]:
    return [set(row[show].tolist()) for row, show in zip(plan.kept, plan.shown, strict=True)]


@pytest.mark.parametrize(("name", "most"), [("flip", 8), ("e_clip", 11), ("clip_pgs", 11), ("a_clip", 8)])
def test_the_transformer_gets_fewer_patches(name, most):
    encoder, batch = tiny_encoder(), tiny_batch(6)
    objective = build_objective(name, settings={"hidden": 8} if name == "a_clip" else {})
    objective.attach(encoder)
    lengths = []
    encoder.clip.visual.transformer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    found = encode(objective, encoder, batch)
    assert lengths == [1 + most]  # of 16
    assert found.kept.shape == (6, most)
    terms = objective.loss(found, batch)
    terms.total.backward()
    assert encoder.clip.visual.proj.grad.isfinite().all()


# ---- FLIP ------------------------------------------------------------------------------------------------------------


def test_flip_tunes_on_whole_images_at_the_end():
    encoder, batch = tiny_encoder(), tiny_batch(4)
    objective = Flip(FlipSettings(keep=0.25, tuning=0.1))
    lengths = []
    encoder.clip.visual.transformer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    for step, patches in ((0, 4), (89, 4), (90, 16), (99, 16)):
        objective.progress(step, 100)
        encode(objective, encoder, batch)
        assert lengths[-1] == 1 + patches
    whole = terms_of(objective, encoder, batch).total
    assert torch.equal(whole, terms_of(Clip(), encoder, batch).total)


def test_flips_tuning_has_a_learning_rate_of_its_own():
    objective = Flip(FlipSettings(tuning=0.1, tuning_rate=0.02))
    assert objective.phase(89, 100) == Phase(0, 90)
    assert objective.phase(90, 100) == Phase(90, 100, 0.02)
    assert Flip(FlipSettings(tuning=0.0)).phase(99, 100) == Phase(0, 100)


# ---- E-CLIP ----------------------------------------------------------------------------------------------------------


def test_e_clip_masks_by_pixels_unless_told_otherwise():
    objective = EClip()
    objective.progress(9, 10)
    one, other = (visible(planned(objective, pictures(), tower(seed))) for seed in (0, 1))
    assert one == other


def test_e_clip_moves_from_pixels_to_embeddings_when_told_so():
    objective = EClip(EClipSettings(embedding=True))
    expected = visible(planned(EClip(), pictures()))
    found = []
    for step in (0, 10):
        objective.progress(step, 10)
        found.append(visible(planned(objective, pictures())))
    assert found[0] == expected
    assert found[1] != expected


def test_e_clip_masks_half_of_all_patches_and_a_third_of_each_image():
    chosen = planned(EClip(EClipSettings(least=0.3)), pictures(40))
    assert chosen.kept.shape == (40, 44)
    assert chosen.shown.float().sum() / (40 * 64) == pytest.approx(0.5, abs=0.01)


def test_a_fixed_threshold_replaces_the_search():
    assert planned(EClip(EClipSettings(threshold=1.1)), pictures()).shown.all()
    # Everything is masked: one patch is shown all the same.
    assert (planned(EClip(EClipSettings(threshold=-1.1)), pictures()).shown.sum(1) == 1).all()


# ---- CLIP-PGS --------------------------------------------------------------------------------------------------------


def test_clip_pgs_never_masks_an_edge():
    images = pictures(20)
    chosen = planned(ClipPgs(), images)
    edges = edge_strength(images, GRID) > 0.5
    assert edges.any(1).all()
    for shown, strong in zip(visible(chosen), edges, strict=True):
        assert set(strong.nonzero().flatten().tolist()) <= shown


@pytest.mark.parametrize(("least", "most"), [(0.3, 44), (0.5, 32)])
def test_clip_pgs_has_two_variants(least, most):
    chosen = planned(ClipPgs(ClipPgsSettings(least=least)), pictures())
    assert chosen.kept.shape == (6, most)
    assert (chosen.shown.sum(1) <= most).all()


def test_clip_pgs_masks_by_the_balanced_mixture():
    images, encoder, objective = pictures(), tower(), ClipPgs(ClipPgsSettings(edge=1.0, least=0.0))
    objective.progress(3, 10)
    found = visible(planned(objective, images, encoder))
    drawn = torch.rand(6, 2, 64, generator=torch.Generator().manual_seed(0))
    anchors = drawn[:, 0].argsort(1)[:, :4]  # 5 % of 64
    _, patches = embed_image(encoder.clip.visual, images)
    mixture = 0.3 * embedding_similarity(patches) + 0.7 * pixel_similarity(images, GRID)
    plan = balance(mixture)
    near = torch.stack([plan[c, anchors[c]].amax(0).scatter(0, anchors[c], 9.0) for c in range(6)])
    limit = near.flatten().sort().values[6 * 32 - 1]  # half of all patches lie above
    assert found == [set((row <= limit).nonzero().flatten().tolist()) for row in near]


@pytest.mark.parametrize("objective", [EClip(EClipSettings(embedding=True)), ClipPgs()], ids=["e_clip", "clip_pgs"])
def test_similarities_take_no_gradient(monkeypatch, objective):
    look, near = objective.look, []

    def watched(*arguments):
        near.append(look(*arguments)[0])
        return look(*arguments)

    monkeypatch.setattr(objective, "look", watched)
    planned(objective, pictures(4).requires_grad_())
    assert len(near) == 1
    assert not near[0].requires_grad
