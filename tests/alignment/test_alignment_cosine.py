"""Sets of regions by cosine: against the definition written as loops, and its gradient by differences."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from alignment_examples import random_parts, random_trees

from powerclip.alignment import AlignmentConfig, Parts, embed_parts, random_boxes
from powerclip.alignment.powerset import best_node_mean, best_set_mean, set_cosines
from powerclip.alignment.ragged import Segments
from powerclip.alignment.regions import embed_region_sets, inverse_set_lengths
from powerclip.alignment.score import score_all, score_pairs

REFERENCE = {"similarity": "cosine", "aggregation": "exact", "backend": "reference"}


def literal(parts: Parts, config: AlignmentConfig) -> list[list[float]]:
    """Q̄ of every image with every caption, set by set and node by node."""
    scores, start = [[] for _ in parts.regions], 0
    for length in parts.segments.lengths.tolist():
        nodes = parts.nodes[start : start + length].tolist()
        start += length
        for row, regions in zip(scores, parts.regions.tolist(), strict=True):
            sizes = range(0 if config.empty_set else 1, len(regions) + 1)
            sets = [chosen for size in sizes for chosen in itertools.combinations(regions, size)]
            q = {(a, t): cosine(chosen, node) for a, chosen in enumerate(sets) for t, node in enumerate(nodes)}
            bounded = [a for a, chosen in enumerate(sets) if len(chosen) <= (config.largest_set or len(regions))]
            r2t = sum(max(q[a, t] for t in range(length)) for a in range(len(sets))) / len(sets)
            t2r = sum(max(q[a, t] for a in bounded) for t in range(length)) / length
            row.append(config.r2t * r2t + config.t2r * t2r)
    return scores


def cosine(chosen: tuple[list[float], ...], node: list[float]) -> float:
    if not chosen:
        return 0.0
    total = [sum(values) for values in zip(*chosen, strict=True)]
    return sum(a * b for a, b in zip(total, node, strict=True)) / math.hypot(*total) / math.hypot(*node)


@pytest.mark.parametrize("settings", [{"r2t": False}, {"t2r": False}, {"empty_set": True}, {"largest_set": 2}])
def test_scores_are_the_definition(settings):
    parts = random_parts(4, 4, 3, seed=0)
    config = AlignmentConfig(**{"largest_set": 0, **REFERENCE, **settings})
    nodes = F.normalize(parts.nodes, dim=-1)  # as `embed_parts` gives them
    expected = torch.tensor(literal(parts, config), dtype=torch.float64)
    torch.testing.assert_close(score_all(parts.regions, nodes, parts.segments, config), expected)
    image, caption = torch.tensor([0, 3, 2, -1]), torch.tensor([1, 3, 0, 2])
    chosen = score_pairs(parts.regions, nodes, parts.segments, image, caption, config)
    torch.testing.assert_close(chosen[:3], expected[image[:3], caption[:3]])
    assert chosen[3] == 0


@pytest.mark.parametrize("seed", range(3))
def test_lengths_of_sets_can_be_divided_out_after_the_sums(seed):
    parts = random_parts(5, 6, 4, seed=seed)
    of_sets = set_cosines(parts.regions, parts.nodes, empty_set=False)
    expected = best_node_mean(of_sets, parts.segments) + best_set_mean(of_sets, parts.segments)
    config = AlignmentConfig(**REFERENCE, largest_set=0)
    scores = score_all(parts.regions, F.normalize(parts.nodes, dim=-1), parts.segments, config)
    torch.testing.assert_close(scores, expected.T)


def test_gradients_go_through_the_lengths_of_sets_and_nodes():
    parts = random_parts(3, 4, 5, seed=1)
    config = AlignmentConfig(**REFERENCE, largest_set=0)

    def scores(regions: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
        return score_all(regions, F.normalize(nodes, dim=-1), parts.segments, config)

    assert torch.autograd.gradcheck(scores, [parts.regions, parts.nodes])


def test_the_length_of_vectors_does_not_matter():
    parts = random_parts(4, 5, 6, seed=2)
    config = AlignmentConfig(**REFERENCE, largest_set=0)
    nodes = F.normalize(parts.nodes, dim=-1)
    scores = score_all(parts.regions, nodes, parts.segments, config)
    torch.testing.assert_close(score_all(3 * parts.regions, nodes, parts.segments, config), scores)
    assert scores.abs().max() <= 2  # the sum of two means of cosines


def test_a_region_that_does_not_belong_lowers_the_best_set_and_one_that_does_raises_it():
    node = F.normalize(torch.tensor([[1.0, 1, 0]]), dim=-1)
    left, right, other = torch.eye(3)
    config = AlignmentConfig(**REFERENCE, largest_set=0, r2t=False)

    def best(*regions: torch.Tensor) -> float:
        return score_all(torch.stack(regions).unsqueeze(0), node, Segments.from_lengths(torch.tensor([1])), config)

    assert best(left) == pytest.approx(math.sqrt(0.5))
    assert best(left, right) == pytest.approx(1)
    assert best(left, right, other) == pytest.approx(1)  # the set of the first two is still the best one
    one = AlignmentConfig(**REFERENCE, largest_set=0, t2r=False)
    together = torch.stack([left, right, other]).unsqueeze(0)
    sets = score_all(together, node, Segments.from_lengths(torch.tensor([1])), one)
    assert sets == pytest.approx((2 * math.sqrt(0.5) + 1 + 2 * 0.5 + math.sqrt(2 / 3)) / 7)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_lengths_come_from_the_gram_matrix(count):
    regions = random_parts(5, count, 16, seed=3).regions
    expected = 1 / embed_region_sets(regions, empty=False).norm(dim=-1)
    inverse = inverse_set_lengths(regions)
    torch.testing.assert_close(inverse[:, 1:], expected)
    assert (inverse[:, 0] == 0).all()


def test_sets_without_a_direction_have_no_similarity_and_send_no_gradient():
    regions = torch.tensor([[[1.0, 0], [-1, 0], [0, 0]]], requires_grad=True)  # two that cancel, one that is nothing
    node, segments = torch.tensor([[1.0, 0]]), Segments.from_lengths(torch.tensor([1]))
    scores = score_all(regions, node, segments, AlignmentConfig(**REFERENCE, largest_set=0, t2r=False))
    assert scores.item() == pytest.approx(0)  # {1}, {1, 3}: 1; {2}, {2, 3}: −1; {3}, {1, 2}, {1, 2, 3}: 0
    (gradient,) = torch.autograd.grad(scores.sum(), regions)
    assert gradient.isfinite().all()
    assert gradient.abs().max() <= 1


def test_nodes_of_cosines_have_length_1():
    generator = torch.Generator().manual_seed(0)
    patches, words = torch.randn(4, 9, 8, generator=generator), torch.randn(4, 12, 8, generator=generator)
    masks = random_boxes(4, 5, (3, 3), generator)
    sums, cosines = (
        embed_parts(patches, masks, words, random_trees(4, 0), AlignmentConfig(similarity=s, aggregation="exact"))
        for s in ("sum", "cosine")
    )
    torch.testing.assert_close(cosines.nodes, F.normalize(sums.nodes, dim=-1))


def test_single_regions_need_no_sets_and_no_enumeration():
    AlignmentConfig(similarity="cosine", region_sets=False)  # NLA is a soft maximum of cosines then
    parts = random_parts(4, 20, 6, seed=4)
    config = AlignmentConfig(similarity="cosine", region_sets=False, aggregation="exact", r2t=False)
    nodes = F.normalize(parts.nodes, dim=-1)
    q = torch.einsum("bmd,td->tbm", parts.regions, nodes)
    expected = torch.stack([own.amax(-1).mean(0) for own in q.split(parts.segments.lengths.tolist())])
    torch.testing.assert_close(score_all(parts.regions, nodes, parts.segments, config).T, expected)
