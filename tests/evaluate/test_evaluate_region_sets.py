"""Best sets and their scores against literal enumeration of every set."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from powerclip.evaluate.region_sets import score_sets

M, K, D = 5, 4, 6


@pytest.fixture(scope="module")
def parts():
    generator = torch.Generator().manual_seed(0)
    regions = F.normalize(torch.randn(M, D, generator=generator), dim=-1).double()
    leaves = torch.tensor([3, 1, 2, 1])
    phrases = torch.stack(
        [F.normalize(torch.randn(count, D, generator=generator), dim=-1).sum(0) for count in leaves.tolist()]
    ).double()
    return regions, phrases, leaves


def all_sets(empty):
    return [list(s) for size in range(0 if empty else 1, M + 1) for s in itertools.combinations(range(M), size)]


def similarity_of(members, regions, phrase, leaves, similarity):
    total = regions[members].sum(0)
    if similarity == "cosine":
        return float(total @ phrase / (total.norm() * phrase.norm()))
    return float(total @ phrase) if similarity == "sum" else float(total @ phrase) / len(members) / int(leaves)


@pytest.mark.parametrize("similarity", ["sum", "mean", "cosine"])
def test_a_phrases_best_set_is_the_best_of_all_and_its_shares_add_up(parts, similarity):
    regions, phrases, leaves = parts
    found = score_sets(*parts, similarity=similarity)
    for number, phrase in enumerate(phrases):
        scores = {
            tuple(members): similarity_of(members, regions, phrase, leaves[number], similarity)
            for members in all_sets(similarity == "sum")
        }
        best = max(scores, key=scores.__getitem__)
        assert tuple(found.best[number].nonzero().flatten().tolist()) == best
        assert float(found.scores[number]) == pytest.approx(scores[best])
        assert not found.shares[number][~found.best[number]].any()
    assert found.t2r == pytest.approx(float(found.scores.mean()))


@pytest.mark.parametrize("similarity", ["sum", "cosine"])
def test_regions_to_text_is_the_mean_over_sets_of_the_best_phrase(parts, similarity):
    regions, phrases, leaves = parts
    best = [
        max(similarity_of(members, regions, phrase, n, similarity) for phrase, n in zip(phrases, leaves, strict=True))
        for members in all_sets(similarity == "sum")
    ]
    assert score_sets(*parts, similarity=similarity).r2t == pytest.approx(sum(best) / len(best))


def test_relative_sums_take_the_regions_that_a_phrase_prefers_more_than_the_others_do(parts):
    regions, phrases, _ = parts
    cosines = F.normalize(phrases, dim=-1) @ regions.T
    relative = cosines - cosines.mean(0) - (cosines - cosines.mean(0)).mean(1, keepdim=True)
    found = score_sets(*parts, similarity="relative")
    sums = torch.stack([relative[:, members].sum(1) for members in all_sets(empty=True)])  # [sets, K]
    for number, column in enumerate(sums.T):
        best = all_sets(empty=True)[int(column.argmax())]
        assert found.best[number].nonzero().flatten().tolist() == best
        assert float(found.scores[number]) == pytest.approx(float(column.max()))
    assert found.t2r == pytest.approx(float(sums.amax(0).mean()))
    assert found.r2t == pytest.approx(float(sums.amax(1).mean()))
    nla = score_sets(*parts, similarity="relative", aggregation="nla")
    assert nla.best.tolist() == found.best.tolist()
    assert nla.t2r == pytest.approx(found.t2r, abs=0.01)


def test_the_approximation_of_sums_is_shared_among_all_regions_and_close_at_a_low_temperature(parts):
    exact, nla, soft = (
        score_sets(*parts, similarity="sum", aggregation=kind, tau=tau)
        for kind, tau in (("exact", 1.0), ("nla", 0.001), ("nla", 0.5))
    )
    torch.testing.assert_close(nla.scores, exact.scores, atol=0.01, rtol=0)
    assert nla.t2r == pytest.approx(float(nla.scores.mean()))
    assert (soft.shares > 0).all()
    assert soft.t2r > exact.t2r
    assert nla.r2t != pytest.approx(exact.r2t, abs=1e-3)


def test_of_two_equal_regions_one_is_enough():
    regions = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), dim=-1)
    found = score_sets(regions, torch.tensor([[2.0, 0.0]]), torch.tensor([1]), similarity="cosine")
    assert found.best.tolist() == [[True, False, False]]
