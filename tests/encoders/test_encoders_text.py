"""Text is encoded only as long as it is, and nothing about it changes."""

import pytest
import torch
import torch.nn.functional as F
from tiny_towers import CONTEXT, VARIANTS, captions, tiny_config

from powerclip.encoders import build, trim
from powerclip.encoders.text import reads_ahead

AHEAD = {"clipa", "bidirectional", "last-pool-causal", "class-token"}


def encoder(variant: str):
    torch.manual_seed(0)
    return build(config=tiny_config(variant)).eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_short_tokens_give_the_embeddings_of_full_ones(variant):
    model = encoder(variant)
    full = captions(9, 4, 12, 2)
    text, words = model.encode_words(full)
    short_text, short_words = model.encode_words(full[:, :12])
    torch.testing.assert_close(short_text, text, atol=1e-6, rtol=0)
    # words are not unit vectors: compare them at the scale of those that are
    torch.testing.assert_close(F.normalize(short_words, dim=-1), F.normalize(words[:, :12], dim=-1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", ["clip", "custom-text", "clipa"])
def test_a_caption_is_embedded_alike_in_whatever_batch_it_comes(variant):
    model = encoder(variant)
    full = captions(9, 4, 12)
    together = model.encode_text(full)
    for row, length in enumerate((9, 4, 12)):
        alone = model.encode_text(full[row : row + 1, :length])
        torch.testing.assert_close(alone[0], together[row], atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_towers_that_look_ahead_pay_for_the_full_length(variant):
    model = encoder(variant)
    lengths = []
    tower = getattr(model.clip, "text", model.clip)
    tower.transformer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    model.encode_text(captions(5, 7, width=7))
    assert reads_ahead(model.clip) == (variant in AHEAD)
    full = CONTEXT + 1 if variant == "class-token" else CONTEXT
    assert lengths == [full if variant in AHEAD else 7]


def test_trim_cuts_behind_the_longest_caption():
    assert torch.equal(trim(captions(9, 4, 12)), captions(9, 4, 12)[:, :12])


def test_trim_keeps_a_caption_whose_last_word_has_the_id_of_the_padding():
    tokens = captions(5)
    tokens[0, 3] = 0
    assert trim(tokens).shape == (1, 5)


def test_trim_keeps_a_full_row_and_an_empty_batch():
    assert trim(captions(CONTEXT)).shape == (1, CONTEXT)
    assert trim(torch.zeros(0, CONTEXT, dtype=torch.long)).shape == (0, CONTEXT)
