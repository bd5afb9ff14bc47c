"""FLIP, E-CLIP and CLIP-PGS: CLIP's loss of fewer patches, and the schedules that go with it."""

from __future__ import annotations

import pytest
import torch
from tiny_batches import tiny_batch, tiny_encoder

from powerclip.encoders import PatchContext
from powerclip.objectives import (
    Clip,
    ClipPgs,
    ClipPgsSettings,
    EClip,
    EClipSettings,
    Flip,
    FlipSettings,
    Phase,
    build_objective,
    encode,
)
from powerclip.objectives.selection import balance, edge_strength, embedding_similarity, pixel_similarity

GRID = (8, 8)


def context(count: int = 6, seed: int = 0) -> PatchContext:
    generator = torch.Generator().manual_seed(seed)
    return PatchContext(
        torch.randn(count, 3, 64, 64, generator=generator), torch.randn(count, 64, 16, generator=generator)
    )


def visible(selection) -> list[set[int]]:
    return [set(row[show].tolist()) for row, show in zip(selection.kept, selection.shown, strict=True)]


@pytest.mark.parametrize(("name", "most"), [("flip", 8), ("e_clip", 11), ("clip_pgs", 11), ("a_clip", 8)])
def test_the_transformer_gets_fewer_patches(name, most):
    encoder, batch = tiny_encoder(), tiny_batch(6)
    objective = build_objective(name, settings={"hidden": 8} if name == "a_clip" else {})
    objective.attach(encoder)
    lengths = []
    encoder.clip.visual.transformer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    found = encode(objective, encoder, batch.images, batch.tokens)
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
        objective.encode(encoder, batch.images, batch.tokens)
        assert lengths[-1] == 1 + patches
    whole = objective(encoder, batch).total
    assert torch.equal(whole, Clip()(encoder, batch).total)


def test_flips_tuning_has_a_learning_rate_of_its_own():
    objective = Flip(FlipSettings(tuning=0.1, tuning_rate=0.02))
    assert objective.phase(89, 100) == Phase(0, 90)
    assert objective.phase(90, 100) == Phase(90, 100, 0.02)
    assert Flip(FlipSettings(tuning=0.0)).phase(99, 100) == Phase(0, 100)


# ---- E-CLIP ----------------------------------------------------------------------------------------------------------


def test_e_clip_masks_by_pixels_unless_told_otherwise():
    one, other = context(), context()
    other = PatchContext(other.images, torch.randn(6, 64, 16))
    objective = EClip()
    objective.progress(9, 10)
    chosen = []
    for seen in (one, other):
        torch.manual_seed(0)
        chosen.append(visible(objective.select(seen, GRID)))
    assert chosen[0] == chosen[1]


def test_e_clip_moves_from_pixels_to_embeddings_when_told_so():
    objective = EClip(EClipSettings(embedding=True))
    seen = context()
    torch.manual_seed(0)
    expected = visible(EClip().select(seen, GRID))
    found = []
    for step in (0, 10):
        objective.progress(step, 10)
        torch.manual_seed(0)
        found.append(visible(objective.select(seen, GRID)))
    assert found[0] == expected
    assert found[1] != expected


def test_e_clip_masks_half_of_all_patches_and_a_third_of_each_image():
    chosen = EClip(EClipSettings(least=0.3)).select(context(40), GRID)
    assert chosen.kept.shape == (40, 44)
    assert chosen.shown.float().sum() / (40 * 64) == pytest.approx(0.5, abs=0.01)


def test_a_fixed_threshold_replaces_the_search():
    assert EClip(EClipSettings(threshold=1.1)).select(context(), GRID).shown.all()
    # Everything is masked: one patch is shown all the same.
    assert (EClip(EClipSettings(threshold=-1.1)).select(context(), GRID).shown.sum(1) == 1).all()


# ---- CLIP-PGS --------------------------------------------------------------------------------------------------------


def test_clip_pgs_never_masks_an_edge():
    seen = context(20)
    chosen = ClipPgs().select(seen, GRID)
    edges = edge_strength(seen.images, GRID) > 0.5
    assert edges.any(1).all()
    for shown, strong in zip(visible(chosen), edges, strict=True):
        assert set(strong.nonzero().flatten().tolist()) <= shown


@pytest.mark.parametrize(("least", "most"), [(0.3, 44), (0.5, 32)])
def test_clip_pgs_has_two_variants(least, most):
    chosen = ClipPgs(ClipPgsSettings(least=least)).select(context(), GRID)
    assert chosen.kept.shape == (6, most)
    assert (chosen.shown.sum(1) <= most).all()


def test_clip_pgs_masks_by_the_balanced_mixture():
    seen, objective = context(), ClipPgs(ClipPgsSettings(edge=1.0, least=0.0))
    objective.progress(3, 10)
    torch.manual_seed(0)
    found = visible(objective.select(seen, GRID))
    torch.manual_seed(0)
    draw, _ = torch.rand(2, 6, 64)
    anchors = draw.argsort(1)[:, :4]  # 5 % of 64
    mixture = 0.3 * embedding_similarity(seen.patches) + 0.7 * pixel_similarity(seen.images, GRID)
    plan = balance(mixture)
    near = torch.stack([plan[c, anchors[c]].amax(0).scatter(0, anchors[c], 9.0) for c in range(6)])
    limit = near.flatten().sort().values[6 * 32 - 1]  # half of all patches lie above
    assert found == [set((row <= limit).nonzero().flatten().tolist()) for row in near]


def test_similarities_take_no_gradient():
    encoder, batch = tiny_encoder(), tiny_batch(4)
    images = batch.images.clone().requires_grad_()
    for objective in (EClip(EClipSettings(embedding=True)), ClipPgs()):
        chosen = objective.select(PatchContext(images, torch.randn(4, 16, 8, requires_grad=True)), encoder.grid)
        assert not chosen.kept.requires_grad
