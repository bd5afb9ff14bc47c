"""SPARC: the local loss is the one of the description, written out token by token."""

from __future__ import annotations

import pytest
import torch
from tiny_batches import features, tiny_batch
from token_examples import Largest, draw
from torch.nn.functional import cosine_similarity

from powerclip.objectives import Sparc, SparcSettings
from powerclip.objectives.base import real_tokens
from powerclip.objectives.clip import clip_loss
from powerclip.objectives.sparc import group_patches, sparc_loss


def literal(words, patches, real, scale):
    total = 0.0
    for c in range(len(words)):
        tokens = [words[c, l] for l in range(words.shape[1]) if real[c, l]]
        groups = []
        for token in tokens:
            s = torch.stack([token @ patch for patch in patches[c]])
            s = (s - s.min()) / (s.max() - s.min())
            s = torch.stack([value if value >= 1 / len(s) else value * 0 for value in s])
            groups.append((s / s.sum()) @ patches[c])
        loss = 0.0
        for l, token in enumerate(tokens):
            to_tokens = torch.stack([scale * cosine_similarity(groups[l], other, dim=0) for other in tokens])
            to_groups = torch.stack([scale * cosine_similarity(token, other, dim=0) for other in groups])
            loss = loss - to_tokens.log_softmax(0)[l] - to_groups.log_softmax(0)[l]
        total = total + loss / len(tokens) / 2
    return total / len(words)


@pytest.mark.parametrize("sizes", [(4, 5, 3), (3, 8, 6), (2, 2, 1)])
def test_loss_and_gradients_are_the_literal_ones(sizes):
    patches, words, real = draw(*sizes)
    scale = torch.tensor(7.0, requires_grad=True)
    results = []
    for function in (sparc_loss, literal):
        loss = function(words, patches, real, scale)
        results.append([loss, *torch.autograd.grad(loss, [words, patches, scale])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), expected.double(), atol=1e-5, rtol=1e-4)


def test_a_token_gathers_the_patches_that_are_like_it_and_no_others():
    patches = torch.eye(4).unsqueeze(0)
    words = torch.tensor([[[1.0, 0.9, 0.1, 0.0]]])
    grouped = group_patches(words, patches)[0, 0]
    torch.testing.assert_close(grouped, torch.tensor([1.0, 0.9, 0.0, 0.0]) / 1.9)


def test_patches_that_are_all_alike_and_padding_that_is_nan_leave_everything_finite():
    _, words, real = draw(3, 5, 4, dtype=torch.float32)
    patches = torch.ones(3, 5, 6, requires_grad=True)
    spoiled = torch.where(real.unsqueeze(-1), words, float("nan"))
    loss = sparc_loss(spoiled, patches, real, torch.tensor(5.0))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, [words, patches]))


def test_only_matched_pairs_are_formed():
    patches, words, real = draw(16, 12, 10, 8, torch.float32)
    with Largest() as largest:
        sparc_loss(words, patches, real, torch.tensor(5.0)).backward()
    assert largest.elements <= 16 * 12 * 10


def test_the_objective_weighs_both_losses():
    encoded, batch = features(6), tiny_batch(6)
    objective = Sparc(SparcSettings(global_weight=0.25, local_weight=3.0, scale=20.0, ends=False))
    terms = objective.loss(encoded, batch)
    clip = clip_loss(encoded.image, encoded.text, encoded.logit_scale)
    local = sparc_loss(encoded.words, encoded.patches, real_tokens(batch.tokens, False), torch.tensor(20.0))
    torch.testing.assert_close(terms.total, 0.25 * clip + 3 * local)
    torch.testing.assert_close(terms.parts["local"], local.detach())
    (gradient,) = torch.autograd.grad(terms.total, [objective.log_scale])
    assert gradient.abs() > 0


def test_the_default_weights_are_one_for_the_local_and_a_half_for_the_global_loss():
    assert (SparcSettings().local_weight, SparcSettings().global_weight) == (1.0, 0.5)


def test_patches_and_tokens_that_are_no_pairs_are_refused():
    real = torch.ones(3, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="no pairs"):
        sparc_loss(torch.ones(3, 5, 4), torch.ones(2, 6, 4), real, torch.tensor(1.0))
    with pytest.raises(ValueError, match="no pairs"):
        sparc_loss(torch.ones(3, 5, 4), torch.ones(3, 6, 4), real[:, :4], torch.tensor(1.0))
