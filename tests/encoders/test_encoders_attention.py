"""Hidden patches are as good as absent, and the class token's attention is what the tower computes."""

import pytest
import torch
from tiny_towers import VARIANTS, captions, tiny_config

from powerclip.encoders import Selection, build
from powerclip.encoders.attention import check_class_attention, class_attention, forward_attention
from powerclip.encoders.vision import forward_image
from powerclip.errors import UserError

SHOWN = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
KEPT = torch.tensor([[0, 3, 8, 9, 20], [1, 2, 5, 11, 23], [4, 6, 7, 12, 13]])


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("training", [True, False])
def test_a_hidden_patch_is_as_good_as_absent(variant, training, images):
    torch.manual_seed(0)
    model = build(config=tiny_config(variant)).train(training)
    with torch.set_grad_enabled(training):
        masked = model(images, captions(9, 4, 12), selector=lambda context: Selection(KEPT, SHOWN))
        for row in range(3):
            alone = model(
                images[row : row + 1],
                captions(9),
                selector=lambda context, row=row: KEPT[row : row + 1, SHOWN[row]],
            )
            torch.testing.assert_close(masked.image[row], alone.image[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(masked.patches[row, SHOWN[row]], alone.patches[0], atol=1e-5, rtol=1e-4)
    assert torch.equal(masked.kept, KEPT)
    assert torch.equal(masked.shown, SHOWN)


def test_every_image_gets_its_own_mask_whatever_its_neighbours_hide(images):
    torch.manual_seed(0)
    model = build(config=tiny_config()).eval()
    order = torch.tensor([2, 0, 1])
    one = forward_image(model.clip.visual, images, lambda context: Selection(KEPT, SHOWN))[0]
    other = forward_image(model.clip.visual, images[order], lambda context: Selection(KEPT[order], SHOWN[order]))[0]
    torch.testing.assert_close(one[order], other)


def test_no_gradient_reaches_a_hidden_patch(images):
    model = build(config=tiny_config())
    images = images.clone().requires_grad_()
    pooled, _, _ = forward_image(model.clip.visual, images, lambda context: Selection(KEPT, SHOWN))
    (gradient,) = torch.autograd.grad(pooled[:, 0].sum(), images)
    assert gradient.isfinite().all()
    patches = gradient.abs().unfold(2, 8, 8).unfold(3, 8, 8).sum((1, 4, 5)).flatten(1)  # [C, N]
    reached = torch.zeros(3, 24, dtype=torch.bool).scatter(1, KEPT, SHOWN)
    assert torch.equal(patches > 0, reached)


@pytest.mark.parametrize("variant", ["clip", "custom-blocks", "ln-after-tok"])
def test_the_attention_walk_gives_the_towers_own_embedding(variant, images):
    torch.manual_seed(0)
    visual = build(config=tiny_config(variant)).eval().clip.visual
    pooled, scores = forward_attention(visual, images)
    torch.testing.assert_close(pooled, forward_image(visual, images)[0])
    assert scores.shape == (3, 24)
    assert (scores > 0).all()
    assert (scores.sum(1) < 1).all()


def test_class_attention_is_the_weight_that_the_block_computes(images):
    torch.manual_seed(0)
    visual = build(config=tiny_config()).eval().clip.visual
    block = visual.transformer.resblocks[0]
    x = torch.randn(3, 25, 32)
    y = block.ln_1(x)
    _, weights = block.attn(y, y, y, need_weights=True, average_attn_weights=True)
    torch.testing.assert_close(class_attention(block, x), weights[:, 0, 1:])


def test_a_tower_without_a_pooled_class_token_is_refused():
    with pytest.raises(UserError, match="pool_type 'avg'"):
        check_class_attention(build(config=tiny_config("avg-pool")).clip.visual)
