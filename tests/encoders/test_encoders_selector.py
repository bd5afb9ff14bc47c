"""A selector decides which patches the transformer sees."""

import pytest
import torch
from tiny_towers import captions, tiny_config

from powerclip.encoders import PatchContext, RandomPatches, build


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build(config=tiny_config()).eval()


def every_third(context: PatchContext) -> torch.Tensor:
    count, patches = context.patches.shape[:2]
    return torch.arange(0, patches, 3).expand(count, -1)


def test_keeping_all_patches_changes_nothing(model, images, tokens):
    plain = model(images, tokens)
    kept = model(images, tokens, selector=RandomPatches(keep=1.0))
    assert torch.equal(kept.patches, plain.patches)
    assert torch.equal(kept.image, plain.image)
    assert torch.equal(kept.kept, torch.arange(24).expand(3, -1))


def test_dropped_patches_never_reach_the_transformer(model, images, tokens):
    lengths = []
    model.clip.visual.transformer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    features = model(images, tokens, selector=every_third)
    assert lengths == [1 + 8]
    assert features.patches.shape == (3, 8, 24)
    assert torch.equal(features.kept, torch.arange(0, 24, 3).expand(3, -1))


def test_what_is_in_a_dropped_patch_does_not_matter(model, images, tokens):
    before = model(images, tokens, selector=every_third)
    painted = images.clone()
    painted[:, :, :8, 8:16] += 5.0  # patch 1 of the grid, which every_third drops
    after = model(painted, tokens, selector=every_third)
    assert torch.equal(after.image, before.image)
    assert not torch.equal(model(painted, tokens).image, model(images, tokens).image)


def test_a_patch_keeps_its_position_when_others_go(model, images, tokens):
    seen = []
    model.clip.visual.transformer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(images, tokens)
    model(images, tokens, selector=every_third)
    assert torch.equal(seen[1], seen[0][:, [0, *range(1, 25, 3)]])


def test_a_selector_sees_images_and_positioned_patches(model, images, tokens):
    seen = []

    def watch(context: PatchContext) -> torch.Tensor:
        seen.append(context)
        return every_third(context)

    model(images, tokens, selector=watch)
    assert torch.equal(seen[0].images, images)
    torch.testing.assert_close(model.clip.visual.ln_pre(seen[0].patches), model.clip.visual._embeds(images)[:, 1:])


def test_random_patches_are_ascending_distinct_and_differ_between_images():
    torch.manual_seed(0)
    context = PatchContext(torch.zeros(4, 3, 32, 32), torch.zeros(4, 64, 8))
    kept = RandomPatches(keep=0.25)(context)
    assert kept.shape == (4, 16)
    assert (kept.diff(dim=1) > 0).all()
    assert not torch.equal(kept[0], kept[1])


def test_a_share_that_rounds_to_nothing_keeps_one_patch():
    assert RandomPatches(keep=0.01)(PatchContext(torch.zeros(2, 3, 8, 8), torch.zeros(2, 4, 8))).shape == (2, 1)


def test_a_selector_that_returns_no_indices_is_named(model, images, tokens):
    with pytest.raises(ValueError, match=r"indices \[3, n\] with n ≥ 1, not \[3, 0\]"):
        model(images, tokens, selector=lambda context: torch.zeros(3, 0, dtype=torch.long))


def test_configured_patch_dropout_drops_while_training_and_says_which(images, tokens):
    config = tiny_config()
    config["vision_cfg"]["patch_dropout"] = 0.5
    model = build(config=config)
    training = model.train()(images, tokens)
    assert training.patches.shape[1] == 12
    assert training.kept is not None
    assert training.kept.shape == (3, 12)
    assert model.eval()(images, tokens).patches.shape[1] == 24


def test_gradients_pass_through_the_selection(model, images):
    model(images, captions(4, 4, 4), selector=every_third).patches.sum().backward()
    positions = model.clip.visual.positional_embedding.grad[1:].abs().sum(dim=1) > 0
    assert torch.equal(positions.nonzero().flatten(), torch.arange(0, 24, 3))
