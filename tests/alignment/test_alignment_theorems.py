"""The paper's lemmas and theorems, as tests on random instances."""

import math

import pytest
import torch
import torch.nn.functional as F
from alignment_examples import random_segments, random_similarities, random_trees

from powerclip.alignment import Phrases, embed_leaves, embed_nodes
from powerclip.alignment.nla import Activation, log_cosh, log_powerset, nla_t1, nla_t2
from powerclip.alignment.powerset import exact_r2t, exact_t2r, set_similarities
from powerclip.alignment.ragged import segment_max, segment_sum
from powerclip.alignment.regions import embed_region_sets

SEEDS = range(5)
EMPTY = pytest.mark.parametrize("empty_set", [True, False])


def instance(seed: int, regions: int = 6):
    segments = random_segments(4, seed)
    return random_similarities(segments, images=3, regions=regions, seed=seed), segments


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tau", [1.0, 0.1, 0.001])
def test_lemma_a1_the_soft_maximum_over_sets_is_within_tau_m_log_2(seed, tau):
    q, _ = instance(seed)
    best = set_similarities(q).amax(-1)
    soft = tau * torch.logsumexp(set_similarities(q) / tau, -1)
    gap = soft - best
    assert (gap >= -1e-12).all()
    assert (gap <= tau * q.shape[-1] * math.log(2) + 1e-12).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_lemma_b1_the_sum_over_the_powerset_is_a_product_of_hyperbolic_cosines(seed):
    q, _ = instance(seed)
    tau = 0.3
    enumerated = (set_similarities(q) / tau).exp().sum(-1)
    product = 2 ** q.shape[-1] * (q.sum(-1) / (2 * tau)).exp() * (q / (2 * tau)).cosh().prod(-1)
    torch.testing.assert_close(enumerated, product)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.75, 1.0])
def test_lemma_b2_the_soft_maximum_over_nodes_is_within_tau_z(seed, alpha):
    q, segments = instance(seed)
    tau, regions = 0.05, q.shape[-1]
    gamma = (1 - alpha) / 2 * q.sum(-1) + alpha * set_similarities(q).amax(-1)
    soft_gamma = (1 - alpha) / 2 * q.sum(-1) + alpha * tau * torch.logsumexp(set_similarities(q) / tau, -1)
    lowest = segment_max(gamma, segments)
    members = segment_max(soft_gamma, segments)[segments.index]
    total = torch.zeros_like(lowest).index_add(0, segments.index, ((soft_gamma - members) / tau).exp())
    soft = segment_max(soft_gamma, segments) + tau * total.log()
    z = alpha * regions * math.log(2) + segments.lengths_like(soft).log()
    assert (soft >= lowest - 1e-12).all()
    assert (soft <= lowest + tau * z + 1e-12).all()


@EMPTY
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tau", [1.0, 0.1, 0.01, 0.001])
def test_theorem_1_nla_t1_is_within_tau_m_log_2_of_the_exact_t2r(seed, tau, empty_set):
    q, segments = instance(seed)
    error = nla_t1(q, segments, tau, empty_set=empty_set) - exact_t2r(q, segments, empty_set=empty_set)
    assert (error >= -1e-12).all()
    assert (error <= tau * q.shape[-1] * math.log(2) + 1e-12).all()


@EMPTY
@pytest.mark.parametrize("seed", SEEDS)
def test_corollary_1_nla_t1_with_relu_is_the_exact_t2r(seed, empty_set):
    q, segments = instance(seed)
    exact = exact_t2r(q, segments, empty_set=empty_set)
    torch.testing.assert_close(nla_t1(q, segments, 0.001, "relu", empty_set=empty_set), exact)


@EMPTY
def test_corollary_1_holds_when_every_similarity_is_negative(empty_set):
    segments = random_segments(4, 0)
    q = -random_similarities(segments, images=3, regions=5, seed=0).abs() - 0.01
    exact = exact_t2r(q, segments, empty_set=empty_set)
    torch.testing.assert_close(nla_t1(q, segments, 0.001, "relu", empty_set=empty_set), exact)
    assert (exact == 0).all() if empty_set else (exact < 0).all()


@EMPTY
@pytest.mark.parametrize("seed", SEEDS)
def test_theorem_2_alpha_0_and_1_bound_the_exact_r2t(seed, empty_set):
    q, segments = instance(seed)
    tau = 1e-4
    exact = exact_r2t(q, segments, empty_set=empty_set)
    slack = tau * (q.shape[-1] * math.log(2) + math.log(6))
    assert (nla_t2(q, segments, tau, 0.0, empty_set=empty_set) <= exact + slack).all()
    assert (nla_t2(q, segments, tau, 1.0, empty_set=empty_set) >= exact - slack).all()


@EMPTY
@pytest.mark.parametrize("seed", SEEDS)
def test_theorem_2_some_alpha_makes_nla_t2_exact_for_each_pair(seed, empty_set):
    q, segments = instance(seed)
    tau = 1e-4
    exact = exact_r2t(q, segments, empty_set=empty_set)
    # NLA-T2 need not be monotone in α: look for a crossing on a fine grid, as the intermediate-value proof does.
    curve = torch.stack([nla_t2(q, segments, tau, a, empty_set=empty_set) for a in torch.linspace(0, 1, 401).tolist()])
    closest = (curve - exact).abs().amin(0)
    step = (curve[1:] - curve[:-1]).abs().amax(0)  # the curve is continuous: between two points of the grid it crosses
    bound = tau * (q.shape[-1] * math.log(2) + math.log(6))
    assert (closest <= step + bound).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_theorem_2_quantitative_bounds(seed, alpha):
    q, segments = instance(seed)
    tau, regions = 0.02, q.shape[-1]
    limit = segment_max((1 - alpha) / 2 * q.sum(-1) + alpha * set_similarities(q).amax(-1), segments)
    value = nla_t2(q, segments, tau, alpha)
    log_k = segments.lengths_like(value).log()
    assert (value >= limit - tau * (alpha * regions * math.log(2) + (1 - alpha) * log_k) - 1e-12).all()
    assert (value <= limit + tau * alpha * log_k + 1e-12).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_bilinearity_the_similarity_of_a_set_with_a_node_is_the_sum_over_members(seed):
    phrases = random_trees(3, seed)
    generator = torch.Generator().manual_seed(seed)
    regions = F.normalize(torch.randn(2, 4, 8, generator=generator), dim=-1)
    nodes = embed_nodes(embed_leaves(torch.randn(3, 12, 8, generator=generator), phrases), phrases)
    direct = torch.einsum("bad,td->tba", embed_region_sets(regions), nodes)  # Eq. 5 on Eqs. 1 and 3
    torch.testing.assert_close(set_similarities(torch.einsum("bmd,td->tbm", regions, nodes)), direct)


def nla(
    s0: torch.Tensor, phrases: Phrases, sigma1: Activation, sigma2: Activation, sigma3: Activation, alpha: float
) -> torch.Tensor:
    """§4.1, literally: three layers, each a sum and an activation, from leaf similarities [P, B, M] to [S, B]."""
    captions, first = phrases.node_segments, phrases.leaf_offsets
    leaves = [
        range(int(first[c] + start), int(first[c] + end))
        for c, start, end in zip(captions.index, phrases.node_start, phrases.node_end, strict=True)
    ]
    s1 = torch.stack([sigma1(sum((s0[leaf] for leaf in node), torch.zeros_like(s0[0]))) for node in leaves])
    s2 = sigma2(s1.sum(-1))  # over regions
    total = segment_sum(s2, captions)
    return sigma3(total / captions.lengths_like(total) ** (1 - alpha))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_general_form_with_definition_1_and_2_is_nla_t1_and_nla_t2(seed):
    phrases = random_trees(3, seed)
    generator = torch.Generator().manual_seed(seed)
    leaves = embed_leaves(torch.randn(3, 12, 8, generator=generator), phrases).double()
    regions = F.normalize(torch.randn(2, 4, 8, dtype=torch.float64, generator=generator), dim=-1)
    s0 = torch.einsum("bmd,pd->pbm", regions, leaves)
    q = torch.einsum("bmd,td->tbm", regions, embed_nodes(leaves, phrases))
    tau, alpha, segments = 0.1, 0.75, phrases.node_segments

    def identity(x):
        return x

    t1 = nla(s0, phrases, lambda x: tau * F.softplus(x / tau), identity, identity, alpha=0.0)
    torch.testing.assert_close(nla_t1(q, segments, tau), t1)

    def zeta(x):
        return x + alpha * log_cosh(x)

    t2 = nla(s0, phrases, lambda x: zeta(x / (2 * tau)), torch.exp, lambda x: tau * torch.log(x), alpha)
    torch.testing.assert_close(nla_t2(q, segments, tau, alpha), t2)


@EMPTY
@pytest.mark.parametrize("shift", [0.0, -3.0, -12.0, -40.0, -200.0])
def test_the_closed_form_of_the_sum_over_sets_equals_enumeration(shift, empty_set):
    x = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + shift
    enumerated = torch.logsumexp(set_similarities(x, empty_set=empty_set), -1)
    torch.testing.assert_close(log_powerset(x, empty_set=empty_set), enumerated)
    torch.testing.assert_close(log_powerset(x.float(), empty_set=empty_set).double(), enumerated, rtol=1e-6, atol=1e-6)
