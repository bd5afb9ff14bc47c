"""FILIP: late interaction in blocks is late interaction written out, values and gradients, in little memory."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from tiny_batches import features, tiny_batch
from token_examples import Largest, draw
from torch._dynamo.utils import counters

from powerclip.alignment import late_interaction
from powerclip.alignment.late_interaction import expand_lengths, group_lengths
from powerclip.objectives import Filip, FilipSettings
from powerclip.objectives.base import real_tokens
from powerclip.objectives.clip import clip_loss
from powerclip.objectives.filip import filip_loss


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
    assert_literal(*draw(*sizes))


def assert_literal(v, t, real, lengths=()):
    pull = torch.randn(2, len(v), len(v), generator=torch.Generator().manual_seed(9))
    results = []
    for similarities in (late_interaction.late_interaction(v, t, real, lengths), literal(v, t, real)):
        loss = sum((part * weight).sum() for part, weight in zip(similarities, pull, strict=True))
        results.append([*similarities, *torch.autograd.grad(loss, [v, t])])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-6, rtol=1e-5)


# ---- groups of captions of their own length --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 8, 11])
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("order", ["by length", "as drawn", "lengths in another order"])
def test_groups_of_their_own_length_give_the_literal_similarities_and_gradients(count, ends, order):
    v, t, real = draw(count, 3, 19)
    if order == "by length":
        real = real[real.sum(1).argsort()]
    lengths = real.sum(1).tolist()
    if order == "lengths in another order":
        lengths = lengths[::-1]
    if not ends:
        real = real & ((torch.arange(19) > 0) | (real.sum(1, keepdim=True) == 1))
    assert_literal(v, t, real, lengths)


@pytest.mark.parametrize("known", [True, False])
def test_captions_are_padded_to_the_longest_of_their_eighth_only(known, monkeypatch):
    v, t, _ = draw(16, 2, 40)
    lengths = [3, 33, 4, 5, 20, 6, 7, 7, 8, 8, 8, 9, 10, 11, 17, 18]
    real = torch.arange(40) < torch.tensor(lengths).unsqueeze(1)
    seen = []

    def maxima(patches, words, share):
        seen.append(tuple(words.shape[:2]))
        return plain(patches, words, share)

    plain = late_interaction._maxima
    monkeypatch.setattr(late_interaction, "_maxima", maxima)
    late_interaction.late_interaction(v, t, real, lengths if known else ())
    assert seen == [(2, length) for length in ([8, 8, 8, 8, 16, 16, 24, 40] if known else [40] * 8)]


def test_lengths_that_would_cut_a_caption_are_an_error():
    v, t, _ = draw(9, 2, 24)
    lengths = [3, 4, 5, 6, 7, 8, 8, 9, 24]
    real = torch.arange(24) < torch.tensor(lengths).unsqueeze(1)
    late_interaction.late_interaction(v, t, real, lengths)
    with pytest.raises(RuntimeError, match="longer than `lengths` say"):
        late_interaction.late_interaction(v, t, real, [*lengths[:-1], 16])
    with pytest.raises(ValueError, match="8 lengths for 9 captions"):
        late_interaction.late_interaction(v, t, real, lengths[1:])


@pytest.mark.parametrize("counts", [(3, 3), (12, 12, 12), (64, 64)])
def test_what_ranks_tell_each_other_of_their_lengths_bounds_the_captions_of_all(counts):
    generator = torch.Generator().manual_seed(sum(counts))
    of_ranks = [torch.randint(2, 78, (count,), generator=generator).tolist() for count in counts]
    gathered = [group_lengths(of_rank) for of_rank in of_ranks]
    assert all(len(groups) <= 8 for groups in gathered)
    bounds = [bound for groups, count in zip(gathered, counts, strict=True) for bound in expand_lengths(groups, count)]
    assert len(bounds) == sum(counts)
    lengths = [length for of_rank in of_ranks for length in of_rank]
    assert all(length <= bound for length, bound in zip(sorted(lengths), sorted(bounds), strict=True))
    assert max(bounds) == max(lengths)


def test_as_a_gpu_compiles_it_each_length_is_one_shape(monkeypatch):
    # aot_eager traces everything that a full compilation would, without waiting for a C++ compiler.
    monkeypatch.setattr(
        late_interaction, "compile_shapes", partial(late_interaction.compile_shapes, backend="aot_eager")
    )
    compiled = cache(late_interaction._compiled.__wrapped__)
    monkeypatch.setattr(late_interaction, "_compiled_on_gpu", lambda tensor, function: compiled(function))
    v, t, _ = draw(16, 2, 16)
    lengths = [3, 4, 5, 6, 7, 8, 8, 8, 8, 8, 9, 10, 11, 12, 15, 16]
    real = torch.arange(16) < torch.tensor(lengths).unsqueeze(1)
    monkeypatch.setattr(late_interaction, "BLOCK_ELEMENTS", 2 * 2 * 16 * 9)  # 8 images, and not 9, with 2 × 16 tokens
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    assert_literal(v, t, real, lengths)
    assert counters["stats"]["unique_graphs"] - before == 2 * 2  # lengths 8 and 16, forward and backward


# ---- the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_cross_entropy_of_each_similarity():
    v, t, real = draw(5, 4, 6)
    to_text, to_image = literal(F.normalize(v, dim=-1), F.normalize(t, dim=-1), real)
    scale = torch.tensor(10.0)
    losses = [
        -(scale * to_text).log_softmax(1).diagonal().mean(),
        -(scale * to_image).log_softmax(0).diagonal().mean(),
    ]
    loss = filip_loss(t.float(), v.float(), real, scale)
    assert loss.item() == pytest.approx(sum(losses).item() / 2, abs=1e-5)


def test_padding_does_not_count_even_where_it_is_nan():
    v, t, real = draw(4, 3, 5, dtype=torch.float32)
    clean = filip_loss(t, v, real, torch.tensor(5.0))
    spoiled = torch.where(real.unsqueeze(-1), t, float("nan"))
    loss = filip_loss(spoiled, v, real, torch.tensor(5.0))
    assert torch.equal(loss, clean)
    gradients = torch.autograd.grad(loss, [v, t])
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
    encoded, batch = features(6), tiny_batch(6)
    objective = Filip(FilipSettings(global_weight=0.25, scale=20.0))
    terms = objective.loss(encoded, batch)
    clip = clip_loss(encoded.image, encoded.text, encoded.logit_scale)
    local = filip_loss(encoded.words, encoded.patches, real_tokens(batch.tokens, True), torch.tensor(20.0))
    torch.testing.assert_close(terms.total, 0.25 * clip + local)
    inputs = [encoded.patches, encoded.words, encoded.image, objective.log_scale]
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


def test_patches_and_tokens_that_are_no_pairs_are_refused():
    real = torch.ones(3, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="no pairs"):
        filip_loss(torch.ones(3, 5, 4), torch.ones(2, 6, 4), real, torch.tensor(1.0))
    with pytest.raises(ValueError, match="no pairs"):
        filip_loss(torch.ones(3, 5, 4), torch.ones(3, 6, 4), real[:, :4], torch.tensor(1.0))
