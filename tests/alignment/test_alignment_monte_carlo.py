"""Drawing sets instead of enumerating them: unbiased, with an honest error."""

import pytest
import torch
from alignment_examples import random_segments, random_similarities

from powerclip.alignment.monte_carlo import monte_carlo_r2t, sample_sets
from powerclip.alignment.powerset import exact_r2t

EMPTY = pytest.mark.parametrize("empty_set", [True, False])


@EMPTY
def test_the_mean_of_many_estimates_is_the_exact_value_and_their_spread_is_the_stated_error(empty_set):
    segments = random_segments(3, 0)
    q = random_similarities(segments, images=2, regions=4, seed=0)
    exact = exact_r2t(q, segments, empty_set=empty_set)
    generator = torch.Generator().manual_seed(0)
    runs = [monte_carlo_r2t(q, segments, 16, empty_set=empty_set, generator=generator) for _ in range(2000)]
    means = torch.stack([run.mean for run in runs])
    errors = torch.stack([run.standard_error for run in runs])
    # The mean of 2,000 estimates lies within four of its own standard errors of the truth.
    assert ((means.mean(0) - exact).abs() < 4 * means.std(0) / len(runs) ** 0.5 + 1e-12).all()
    # Squared standard errors are unbiased for the variance of the estimate.
    torch.testing.assert_close(errors.square().mean(0), means.var(0), rtol=0.15, atol=1e-12)


def test_more_regions_than_can_be_enumerated():
    segments = random_segments(3, 1)
    q = random_similarities(segments, images=2, regions=40, seed=1)
    generator = torch.Generator().manual_seed(1)
    few = monte_carlo_r2t(q, segments, 100, generator=generator)
    many = monte_carlo_r2t(q, segments, 10_000, generator=generator)
    assert ((few.mean - many.mean).abs() < 5 * few.standard_error).all()
    torch.testing.assert_close(many.standard_error * 10, few.standard_error, rtol=0.4, atol=0)


def test_blocks_of_sets_give_the_same_estimate(monkeypatch):
    segments = random_segments(3, 2)
    q = random_similarities(segments, images=2, regions=20, seed=2)
    whole = monte_carlo_r2t(q, segments, 50, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr("powerclip.alignment.monte_carlo.BLOCK_ELEMENTS", 7 * q.shape[0] * q.shape[1])
    blocks = monte_carlo_r2t(q, segments, 50, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(blocks.mean, whole.mean)
    torch.testing.assert_close(blocks.standard_error, whole.standard_error)


@EMPTY
def test_sets_are_drawn_uniformly(empty_set):
    drawn = sample_sets(7000, 3, empty_set=empty_set, generator=torch.Generator().manual_seed(0))
    counts = (drawn @ torch.tensor([1, 2, 4])).bincount(minlength=8)
    expected = 7000 / (8 if empty_set else 7)
    assert counts[0] > 0 if empty_set else counts[0] == 0
    assert ((counts[0 if empty_set else 1 :] - expected).abs() < 5 * expected**0.5).all()


def test_gradients_reach_the_best_nodes():
    segments = random_segments(2, 3)
    q = random_similarities(segments, images=2, regions=18, seed=3).requires_grad_()
    (gradient,) = torch.autograd.grad(monte_carlo_r2t(q, segments, 64).mean.sum(), q)
    # Every region is in about half of the sets, and each set's best node gets all of it.
    total = torch.stack([part.sum(0) for part in gradient.split(segments.lengths.tolist())])
    assert (total - 0.5).abs().max() < 0.3


def test_one_set_has_no_error():
    segments = random_segments(2, 0)
    with pytest.raises(ValueError, match="at least 2 drawn sets, not 1"):
        monte_carlo_r2t(random_similarities(segments, 2, 3, 0), segments, 1)
