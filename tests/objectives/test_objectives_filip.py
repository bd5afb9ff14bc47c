"""FILIP: late interaction in blocks is late interaction written out, values and gradients, in little memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_batches import features, tiny_batch
from token_examples import Largest, draw

from powerclip.objectives import Filip, FilipSettings, late_interaction
from powerclip.objectives.clip import clip_loss
from powerclip.objectives.filip import filip_loss
from powerclip.objectives.words import real_tokens


def literal(v, t, real):
    """Both similarities, pair by pair and token by token."""
    count, rows = len(v), []
    for i in range(count):
        for j in range(count):
            words = [t[j, l] for l in range(t.shape[1]) if real[j, l]]
            table = torch.stack([torch.stack([v[i, n] @ word for word in words]) for n in range(v.shape[1])])
            rows.append([table.max(1).values.mean(), table.max(0).values.mean()])
    return tuple(torch.stack([row[k] for row in rows]).view(count, count) for k in (0, 1))


@pytest.mark.parametrize("block", [1, 60, 2**27])
@pytest.mark.parametrize("sizes", [(4, 5, 3), (3, 1, 1), (5, 4, 7)])
def test_similarities_and_gradients_are_the_literal_ones(sizes, block, monkeypatch):
    monkeypatch.setattr(late_interaction, "BLOCK_ELEMENTS", block)
    v, t, real = draw(*sizes)
    pull = torch.randn(2, sizes[0], sizes[0], generator=torch.Generator().manual_seed(9))
    results = []
    for function in (late_interaction.late_interaction, literal):
        found = function(v, t, real)
        loss = sum((part * weight).sum() for part, weight in zip(found, pull, strict=True))
        results.append([*found, *torch.autograd.grad(loss, [v, t])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-6, rtol=1e-5)


def test_the_loss_is_the_cross_entropy_of_each_similarity():
    v, t, real = draw(5, 4, 6)
    to_text, to_image = literal(F.normalize(v, dim=-1), F.normalize(t, dim=-1), real)
    scale = torch.tensor(10.0)
    losses = [
        -(scale * to_text).log_softmax(1).diagonal().mean(),
        -(scale * to_image).log_softmax(0).diagonal().mean(),
    ]
    found = filip_loss(t.float(), v.float(), real, scale)
    assert found.item() == pytest.approx(sum(losses).item() / 2, abs=1e-5)


def test_padding_does_not_count_even_where_it_is_nan():
    v, t, real = draw(4, 3, 5, dtype=torch.float32)
    clean = filip_loss(t, v, real, torch.tensor(5.0))
    spoiled = torch.where(real.unsqueeze(-1), t, float("nan"))
    found = filip_loss(spoiled, v, real, torch.tensor(5.0))
    assert torch.equal(found, clean)
    gradients = torch.autograd.grad(found, [v, t])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[1][~real] == 0).all()


def test_nothing_of_the_size_of_all_similarities_is_ever_made(monkeypatch):
    count, patches, tokens, width = 16, 12, 10, 8
    monkeypatch.setattr(late_interaction, "BLOCK_ELEMENTS", 2 * count * patches * tokens)
    v, t, real = draw(count, patches, tokens, width, torch.float32)
    with Largest() as largest:
        filip_loss(t, v, real, torch.tensor(5.0)).backward()
    everything = count * count * patches * tokens
    assert largest.elements <= everything // 8


def test_the_dense_features_of_bf16_towers_are_multiplied_in_bf16_and_summed_in_float32():
    v, t, real = draw(6, 9, 5, dtype=torch.float32)
    exact = filip_loss(t, v, real, torch.tensor(10.0))
    coarse = filip_loss(t.bfloat16(), v.bfloat16(), real, torch.tensor(10.0))
    assert coarse.dtype == torch.float32
    assert coarse.item() == pytest.approx(exact.item(), rel=0.05)


def test_the_objective_adds_clips_loss_and_learns_a_scale():
    found, batch = features(6), tiny_batch(6)
    objective = Filip(FilipSettings(global_weight=0.25, scale=20.0))
    terms = objective.loss(found, batch)
    clip = clip_loss(found.image, found.text, found.logit_scale)
    local = filip_loss(found.words, found.patches, real_tokens(batch.tokens, True), torch.tensor(20.0))
    torch.testing.assert_close(terms.total, 0.25 * clip + local)
    inputs = [found.patches, found.words, found.image, objective.log_scale]
    assert all(gradient.abs().sum() > 0 for gradient in torch.autograd.grad(terms.total, inputs))
    with torch.no_grad():
        objective.log_scale.fill_(9.0)
    objective.clamp()
    assert objective.log_scale.exp().item() == pytest.approx(100)


def test_start_and_end_of_text_take_part_or_do_not():
    tokens = torch.tensor([[98, 5, 6, 99, 0], [98, 99, 0, 0, 0], [98, 7, 8, 9, 99]])
    assert real_tokens(tokens, True).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    # A caption without a word keeps its end of text.
    assert real_tokens(tokens, False).int().tolist() == [[0, 1, 1, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 1, 0]]
