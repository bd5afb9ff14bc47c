"""The exact scores on a CPU against autograd through enumeration in float64, and what they keep in memory."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_examples import INSTANCES, TIED, assert_scores, gradients, instance, reference

from powerclip.alignment import AlignmentConfig
from powerclip.alignment.kernels import exact_all_cpu as module
from powerclip.alignment.kernels.exact_all_cpu import exact_all_cpu, supports
from powerclip.alignment.score import score_all

EXACT = {"aggregation": "exact"}
COSINE = {"aggregation": "exact", "similarity": "cosine"}
CONFIGS = {
    "default": AlignmentConfig(**EXACT),
    "any set": AlignmentConfig(**EXACT, largest_set=0),
    "paper": AlignmentConfig.named("paper", **EXACT),
    "no T2R": AlignmentConfig(**EXACT, t2r=False),
    "best region, empty set": AlignmentConfig.named("paper", **EXACT, largest_set=1),
    "cosine": AlignmentConfig(**COSINE, largest_set=0),
    "cosine, empty set": AlignmentConfig(**COSINE, largest_set=0, empty_set=True),
    "cosine, best region": AlignmentConfig(**COSINE),
    "cosine, sets of two": AlignmentConfig(**COSINE, largest_set=2),
    "cosine, no R2T": AlignmentConfig(**COSINE, largest_set=0, r2t=False),
    "cosine, no T2R": AlignmentConfig(**COSINE, t2r=False),
}


def plain(one, config):
    return gradients(score_all, one, replace(config, backend="reference"), torch.float64)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", sorted(set(INSTANCES) - TIED))
def test_values_and_gradients_equal_enumeration(name, config):
    one, settings = INSTANCES[name](), CONFIGS[config]
    if settings.similarity == "cosine":
        one.nodes = F.normalize(one.nodes, dim=-1)
    expected = plain(one, settings)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        for ours, exact in zip(gradients(exact_all_cpu, one, settings, dtype), expected, strict=True):
            assert_scores(ours, exact, tolerance)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", sorted(TIED))
def test_one_of_tied_nodes_gets_the_gradient_that_all_have_together(name, config):
    one, settings = INSTANCES[name](), CONFIGS[config]
    # Tied sets would be anyone's choice as well.
    one.regions, settings = one.regions[:, :1], replace(settings, empty_set=False)
    (scores, of_regions, of_nodes), expected = (
        gradients(exact_all_cpu, one, settings, torch.float64),
        plain(one, settings),
    )
    assert_scores(scores, expected[0], 1e-10)
    assert_scores(of_regions, expected[1], 1e-10)
    lengths = one.segments.lengths.tolist()
    for ours, theirs in zip(of_nodes.split(lengths), expected[2].split(lengths), strict=True):
        assert_scores(ours.sum(0), theirs.sum(0), 1e-10)


def test_the_first_of_tied_nodes_wins():
    one = instance([3], 2, 3)
    one.nodes = one.nodes[:1].expand(3, -1)
    *_, of_nodes = gradients(exact_all_cpu, one, CONFIGS["no T2R"], torch.float64)
    assert of_nodes[0].abs().min() > 0
    assert (of_nodes[1:] == 0).all()


def test_the_gradient_counts_the_sets_that_a_node_wins():
    """R2T's derivative by q_tm is the share of the sets with region m whose best node is t."""
    q = torch.tensor([[3.0, 1, -2], [1, 2, 1]])  # [nodes, regions]
    one = instance([2], 1, 3, width=3)
    one.regions, one.nodes = torch.eye(3).unsqueeze(0), q
    config = AlignmentConfig(**EXACT, t2r=False, similarity="sum", empty_set=True)
    scores = exact_all_cpu(one.regions, one.nodes.requires_grad_(), one.segments, config)
    (counts,) = torch.autograd.grad(scores.sum(), one.nodes)
    # {}: first · {1}: 3 > 1 · {2}: 1 < 2 · {1, 2}: 4 > 3 · {3}: −2 < 1 · {1, 3}: 1 < 2 · {2, 3}: −1 < 3 · all: 2 < 4
    assert torch.equal(8 * counts, torch.tensor([[2.0, 1, 0], [2, 3, 4]]))


@pytest.mark.parametrize("config", ["default", "cosine"])
def test_blocks_and_chunks_give_the_same_scores_and_gradients(monkeypatch, config):
    one = INSTANCES["ragged, odd"]()
    whole = gradients(exact_all_cpu, one, CONFIGS[config], torch.float64)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 4 * len(one.nodes) * 10)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * 4 * 2**10)
    for ours, expected in zip(gradients(exact_all_cpu, one, CONFIGS[config], torch.float64), whole, strict=True):
        assert_scores(ours, expected, 1e-12)


@pytest.mark.parametrize("config", ["default", "cosine"])
def test_two_runs_give_the_same_bits(config):
    one = INSTANCES["ragged, few"]()
    runs = [gradients(exact_all_cpu, one, CONFIGS[config], torch.float32) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("config", ["default", "cosine"])
def test_pairs_without_weight_are_not_enumerated(monkeypatch, config):
    one = instance([2, 3, 1, 2], 3, 4)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * 2**4)  # a caption a chunk
    regions, nodes = one.regions.requires_grad_(), one.nodes.requires_grad_()
    weights = torch.zeros(3, 4)
    weights[:, 1] = 1
    enumerated, sums = [], module._Enumeration.sums
    scores = exact_all_cpu(regions, nodes, one.segments, CONFIGS[config])
    monkeypatch.setattr(module._Enumeration, "sums", lambda self, at: enumerated.append(at) or sums(self, at))
    _, of_nodes = torch.autograd.grad(scores, [regions, nodes], weights)
    assert len(enumerated) == 3 * (2 if config == "cosine" else 1)  # the nodes of that caption, for R2T and for T2R
    assert of_nodes[2:5].abs().min() > 0
    assert (of_nodes[:2] == 0).all()
    assert (of_nodes[5:] == 0).all()


@pytest.mark.parametrize("config", ["default", "cosine"])
def test_nothing_of_the_size_of_the_sets_is_kept_and_little_is_made(config):
    one = instance([5] * 16, 32, 8)
    kept = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        exact_all_cpu(one.regions.requires_grad_(), one.nodes.requires_grad_(), one.segments, CONFIGS[config])
    assert sorted(kept) == sorted([one.regions.numel(), one.nodes.numel()])


@pytest.mark.parametrize(
    "settings",
    [{"largest_set": 2}, {"region_sets": False}, {"aggregation": "nla"}, {"r2t": False}],  # the last has a closed form
)
def test_what_is_not_enumerated_here_is_said(settings):
    assert not supports(AlignmentConfig(**{**EXACT, **settings}))


def test_more_than_16_regions_are_refused():
    one = instance([2, 1], 2, 17)
    with pytest.raises(ValueError, match="at most 16"):
        exact_all_cpu(one.regions, one.nodes, one.segments, CONFIGS["default"])


def test_float32_scores_are_accurate():
    one = INSTANCES["ragged, odd"]()
    for config in ("default", "cosine"):
        scores = exact_all_cpu(one.regions, one.nodes, one.segments, CONFIGS[config])
        assert_scores(scores, reference(one, CONFIGS[config]), 1e-6)
