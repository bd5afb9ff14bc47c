"""Chosen pairs in Triton, their similarities and exact scores, against the plain formulas: values and gradients."""

import pytest
import torch
from kernel_examples import DEVICE, INSTANCES, assert_scores

from powerclip.alignment import AlignmentConfig
from powerclip.alignment.kernels.exact_pairs import exact_pairs
from powerclip.alignment.kernels.pairs import pairs
from powerclip.alignment.ragged import Rows
from powerclip.alignment.score import aggregate, pair_similarities, score_pairs

NAMES = ["one node each", "one region", "one image", "all equal", "all negative", "zero"]
CONFIGS = {
    "default": {},
    "any set": {"largest_set": 0},
    "with the empty set": {"largest_set": 0, "empty_set": True, "similarity": "sum"},
    "R2T alone": {"t2r": False},
    "T2R alone": {"r2t": False},
}


def chosen(one, count: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs at random, some of them twice, some images and captions never."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(len(one.regions), (count,), generator=generator)
    return image.to(DEVICE), torch.randint(len(one.segments), (count,), generator=generator).to(DEVICE)


def gradients(score, one, dtype: torch.dtype) -> list[torch.Tensor]:
    regions, nodes = one.regions.to(dtype).requires_grad_(), one.nodes.to(dtype).requires_grad_()
    scores = score(regions, nodes)
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [scores.detach(), *torch.autograd.grad((scores * weights.to(scores)).sum(), [regions, nodes])]


@pytest.mark.parametrize("name", ["ragged, odd", *NAMES])
def test_similarities_and_their_gradients_equal_gathered_products(name):
    one = INSTANCES[name]()
    image, caption = chosen(one)
    real = Rows(one.segments.lengths[caption], one.segments.longest).real.unsqueeze(-1)

    def plain(regions, nodes):
        return torch.where(real, pair_similarities(regions, nodes, one.segments, image, caption)[0], 0.0)

    expected = gradients(plain, one, torch.float64)
    found = gradients(lambda regions, nodes: pairs(regions, nodes, one.segments, image, caption), one, torch.float32)
    for ours, exact in zip(found, expected, strict=True):
        assert_scores(ours, exact)


def test_no_pairs_have_no_gradient():
    one = INSTANCES["one region"]()
    none = torch.zeros(0, dtype=torch.long, device=DEVICE)
    scores, *found = gradients(
        lambda regions, nodes: pairs(regions, nodes, one.segments, none, none), one, torch.float32
    )
    assert scores.shape == (0, 4, 1)
    assert all((gradient == 0).all() for gradient in found)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", NAMES)
def test_exact_scores_and_gradients_equal_enumeration(name, config):
    one = INSTANCES[name]()
    image, caption = chosen(one)
    settings = AlignmentConfig(aggregation="exact", backend="triton", **CONFIGS[config])

    def plain(regions, nodes):
        q, _ = pair_similarities(regions, nodes, one.segments, image, caption)
        rows = Rows(one.segments.lengths[caption], one.segments.longest)
        return aggregate(q.flatten(0, 1).unsqueeze(1), rows, settings).squeeze(-1)

    def ours(regions, nodes):
        return score_pairs(regions, nodes, one.segments, image, caption, settings)

    for found, expected in zip(gradients(ours, one, torch.float32), gradients(plain, one, torch.float64), strict=True):
        assert_scores(found, expected)


def test_more_sets_than_one_tile_holds():
    q = torch.randn(5, 6, 9, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows = Rows(torch.tensor([3, 6, 1, 4, 2], device=DEVICE), 6)
    settings = AlignmentConfig(aggregation="exact", t2r=False, similarity="sum")
    expected = aggregate(q.double().flatten(0, 1).unsqueeze(1), rows, settings).squeeze(-1)
    assert_scores(exact_pairs(q, rows.lengths, empty_set=False), expected)


def test_two_runs_give_the_same_bits():
    one = INSTANCES["ragged, odd"]()
    image, caption = chosen(one, 40)
    runs = [gradients(lambda r, n: pairs(r, n, one.segments, image, caption), one, torch.float32) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
