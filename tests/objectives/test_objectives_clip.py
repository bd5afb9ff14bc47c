"""CLIP's objective: the loss that open_clip computes, values and gradients."""

from __future__ import annotations

import pytest
import torch
from open_clip.loss import ClipLoss
from tiny_batches import features, tiny_batch
from torch.nn.functional import normalize

from powerclip.errors import UserError
from powerclip.objectives import Clip, PowerClip, build_objective
from powerclip.objectives.clip import clip_loss


@pytest.mark.parametrize("count", [2, 7])
@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
def test_value_and_gradients_are_open_clips(count, scale):
    generator = torch.Generator().manual_seed(count)
    leaves = [torch.randn(count, 8, generator=generator, dtype=torch.double) for _ in range(2)]
    losses, gradients = [], []
    for function in (clip_loss, ClipLoss()):
        image, text = (leaf.float().requires_grad_() for leaf in leaves)
        factor = torch.tensor(scale, requires_grad=True)
        loss = function(normalize(image, dim=-1), normalize(text, dim=-1), factor)
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, [image, text, factor]))
    assert torch.allclose(*losses)
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_the_objective_is_the_loss_of_the_global_embeddings():
    encoded = features(5)
    terms = Clip().loss(encoded, tiny_batch(5))
    assert torch.equal(terms.total, clip_loss(encoded.image, encoded.text, encoded.logit_scale))
    assert terms.parts.keys() == {"clip"}
    assert not terms.parts["clip"].requires_grad
    assert not list(Clip().parameters())


def test_an_objective_is_built_by_its_name_and_a_wrong_name_is_answered():
    assert isinstance(build_objective("clip"), Clip)
    assert isinstance(build_objective("powerclip"), PowerClip)
    with pytest.raises(UserError, match=r"did you mean 'powerclip'\?"):
        build_objective("powrclip")


@pytest.mark.parametrize("count", [2, 4])
def test_embeddings_that_are_no_pairs_are_refused(count):
    with pytest.raises(ValueError, match=r"images \[3, 8\] and captions \[\d, 8\] are no pairs"):
        clip_loss(torch.ones(3, 8), torch.ones(count, 8), torch.tensor(1.0))
