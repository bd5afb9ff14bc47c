"""The form of the loss for several ranks. With real processes it is tested in tests/train; here it has one rank."""

import pytest
import torch
from alignment_examples import random_parts
from test_alignment_loss import CONFIGS, with_gradient

from powerclip.alignment import AlignmentConfig, Parts, alignment_loss
from powerclip.alignment import spread as spread_module
from powerclip.alignment.contrast import hardest
from powerclip.alignment.score import score_all
from powerclip.alignment.spread import find_hardest, gather_nodes, spread_contrast
from powerclip.ranks import ALONE


@pytest.mark.parametrize("gradient", ["select", "autograd"])
@pytest.mark.parametrize("name", CONFIGS)
def test_for_one_rank_it_is_the_loss_of_one_process(name, gradient):
    config = with_gradient(CONFIGS[name], gradient)
    results = []
    for spread in (True, False):
        parts = random_parts(8, 5, 16, seed=0, dtype=torch.float32)
        if spread:
            loss, positive, worst = spread_contrast(parts, config, config.scale, ALONE)
        else:
            whole = alignment_loss(parts, config)
            loss, positive, worst = whole.loss, whole.positive, whole.negative
        results.append([loss, positive.mean(), worst.mean(), *torch.autograd.grad(loss, [parts.regions, parts.nodes])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("block", [1, 16, 1000])
def test_the_hardest_are_found_in_blocks_of_any_size(monkeypatch, k, block):
    monkeypatch.setattr(spread_module, "BLOCK_ELEMENTS", block)
    parts, config = random_parts(7, 4, 8, seed=2), AlignmentConfig()
    captions, images = find_hardest(parts, config, k, ALONE)
    scores = score_all(parts.regions, parts.nodes, parts.segments, config).detach()
    assert torch.equal(captions, hardest(scores, k))
    assert torch.equal(images, hardest(scores.T, k))


def test_nodes_that_are_gathered_from_one_rank_are_its_own():
    parts: Parts = random_parts(5, 3, 8, seed=1)
    nodes, segments = gather_nodes(parts, ALONE)
    assert torch.equal(nodes, parts.nodes)
    assert torch.equal(segments.index, parts.segments.index)
    assert segments.longest == parts.segments.longest
