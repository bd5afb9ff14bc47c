"""Phrases: Eqs. 3 and 4 by matrix products, against loops."""

import pytest
import torch
import torch.nn.functional as F
from alignment_examples import random_trees

from powerclip.alignment import embed_leaves, embed_nodes
from powerclip.alignment.phrases import leaf_rows, nodes_of_rows, single_tokens
from powerclip.alignment.ragged import unpad


def word_features(phrases, seed=0):
    return torch.randn(*phrases.words.shape, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(5))
def test_leaves_and_nodes_equal_the_literal_sums(seed):
    phrases = random_trees(4, seed)
    words = word_features(phrases)
    leaves = embed_leaves(words, phrases)
    nodes = embed_nodes(leaves, phrases)
    leaf = 0
    node = 0
    for caption in range(len(phrases)):
        own = []
        for _ in range(int(phrases.leaf_offsets[caption + 1] - phrases.leaf_offsets[caption])):
            total = words[caption, phrases.leaf_start[leaf] : phrases.leaf_end[leaf]].sum(0)
            own.append(total / total.norm())
            torch.testing.assert_close(leaves[leaf], own[-1])
            leaf += 1
        for _ in range(int(phrases.node_offsets[caption + 1] - phrases.node_offsets[caption])):
            members = own[int(phrases.node_start[node]) : int(phrases.node_end[node])]
            torch.testing.assert_close(nodes[node], torch.stack(members).sum(0))
            node += 1
    assert node == len(nodes)


def test_punctuation_inside_a_leaf_is_left_out():
    phrases = random_trees(1, 0)
    start, end = int(phrases.leaf_start[0]), int(phrases.leaf_end[0])
    assert end - start >= 2
    words = word_features(phrases)
    phrases.words[0, start] = False
    torch.testing.assert_close(embed_leaves(words, phrases)[0], F.normalize(words[0, start + 1 : end].sum(0), dim=0))


def test_padding_that_holds_nan_does_not_spread():
    phrases = random_trees(3, 1)
    words = word_features(phrases)
    poisoned = torch.where(phrases.words.unsqueeze(-1), words, torch.nan).requires_grad_()
    leaves = embed_leaves(poisoned, phrases)
    torch.testing.assert_close(leaves, embed_leaves(words, phrases))
    (gradient,) = torch.autograd.grad(embed_nodes(leaves, phrases).sum(), poisoned)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("mean", [False, True])
def test_centred_words_are_words_less_the_mean_of_all_words(mean):
    phrases = random_trees(4, 5)
    words = word_features(phrases).requires_grad_()
    poisoned = torch.where(phrases.words.unsqueeze(-1), words, torch.nan)
    leaves = leaf_rows(poisoned, phrases, centred=True)
    nodes = nodes_of_rows(leaves, phrases, phrases.node_segments, mean=mean)
    expected_leaves = embed_leaves(words - words[phrases.words].mean(0), phrases)
    expected = embed_nodes(expected_leaves, phrases)
    if mean:
        expected = expected / (phrases.node_end - phrases.node_start).unsqueeze(-1)
    torch.testing.assert_close(unpad(leaves, phrases.leaf_segments), expected_leaves, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(nodes, expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    one, other = (torch.autograd.grad((weight * found).sum(), words) for found in (nodes, expected))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_bf16_words_are_summed_in_float32_and_get_a_bf16_gradient():
    phrases = random_trees(3, 6)
    words = word_features(phrases).bfloat16().requires_grad_()
    leaves = embed_leaves(words, phrases)
    torch.testing.assert_close(leaves, embed_leaves(words.float(), phrases))
    (gradient,) = torch.autograd.grad(leaves.sum(), words)
    assert gradient.dtype == torch.bfloat16


def test_a_caption_gives_the_same_phrases_alone_and_in_a_ragged_batch():
    phrases = random_trees(4, 2)
    words = word_features(phrases)
    nodes = embed_nodes(embed_leaves(words, phrases), phrases)
    caption = 2
    leaf = slice(int(phrases.leaf_offsets[caption]), int(phrases.leaf_offsets[caption + 1]))
    node = slice(int(phrases.node_offsets[caption]), int(phrases.node_offsets[caption + 1]))
    alone = type(phrases)(
        words=phrases.words[caption : caption + 1],
        leaf_start=phrases.leaf_start[leaf],
        leaf_end=phrases.leaf_end[leaf],
        leaf_offsets=torch.tensor([0, leaf.stop - leaf.start]),
        node_start=phrases.node_start[node],
        node_end=phrases.node_end[node],
        node_offsets=torch.tensor([0, node.stop - node.start]),
        max_leaves=leaf.stop - leaf.start,
        max_nodes=node.stop - node.start,
    )
    again = embed_nodes(embed_leaves(words[caption : caption + 1], alone), alone)
    torch.testing.assert_close(again, nodes[node])


def test_single_tokens_makes_every_word_a_leaf_and_a_node():
    phrases = random_trees(4, 3)
    words = word_features(phrases)
    tokens = single_tokens(phrases)
    nodes = embed_nodes(embed_leaves(words, tokens), tokens)
    torch.testing.assert_close(nodes, F.normalize(words[phrases.words], dim=-1))
    assert torch.equal(tokens.node_segments.lengths, phrases.words.sum(1))


def test_moving_to_a_device_keeps_every_field():
    phrases = random_trees(2, 4)
    moved = phrases.to("meta")
    assert moved.node_start.device.type == "meta"
    assert moved.max_leaves == phrases.max_leaves
