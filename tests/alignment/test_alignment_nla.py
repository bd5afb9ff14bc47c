"""NLA: activations, numerical range, gradients."""

import pytest
import torch
import torch.nn.functional as F
from alignment_examples import random_segments, random_similarities

from powerclip.alignment.nla import T1_ACTIVATIONS, T2_ANTIDERIVATIVES, nla_t1, nla_t2

EMPTY = pytest.mark.parametrize("empty_set", [True, False])


@pytest.mark.parametrize("act", T1_ACTIVATIONS)
def test_t1_is_the_mean_over_nodes_of_the_activated_sum_over_regions(act):
    segments = random_segments(3, 0)
    q = random_similarities(segments, images=2, regions=4, seed=0)
    literal = {"softplus": F.softplus, "relu": F.relu, "gelu": F.gelu, "swish": lambda x: x * x.sigmoid()}[act]
    per_node = (0.1 * literal(q / 0.1)).sum(-1)
    expected = torch.stack([part.mean(0) for part in per_node.split(segments.lengths.tolist())])
    torch.testing.assert_close(nla_t1(q, segments, 0.1, act), expected)


@pytest.mark.parametrize(
    ("act", "derivative"), [("tanh", torch.tanh), ("sigmoid", torch.sigmoid), ("softsign", F.softsign)]
)
def test_t2_activations_integrate_to_zeta_and_vanish_at_zero(act, derivative):
    antiderivative = T2_ANTIDERIVATIVES[act]
    x = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(antiderivative(x).sum(), x)
    torch.testing.assert_close(slope, derivative(x), atol=1e-7, rtol=1e-6)
    assert antiderivative(torch.zeros(1, dtype=torch.float64)).abs().item() < 1e-12


@pytest.mark.parametrize("act", T2_ANTIDERIVATIVES)
@pytest.mark.parametrize("alpha", [0.0, 0.75, 1.0])
def test_t2_is_the_literal_definition_2(act, alpha):
    segments = random_segments(3, 1)
    q = random_similarities(segments, images=2, regions=4, seed=1)
    tau = 0.2
    zeta = q / (2 * tau) + alpha * T2_ANTIDERIVATIVES[act](q / (2 * tau))
    s2 = zeta.sum(-1).exp()
    expected = torch.stack(
        [tau * (part.sum(0) / len(part) ** (1 - alpha)).log() for part in s2.split(segments.lengths.tolist())]
    )
    torch.testing.assert_close(nla_t2(q, segments, tau, alpha, act), expected)


@EMPTY
@pytest.mark.parametrize("tau", [1e-4, 1e-3, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [-8.0, 0.0, 8.0])
def test_values_and_gradients_stay_finite_from_tau_1e_minus_4_to_1(tau, dtype, shift, empty_set):
    segments = random_segments(4, 2)
    q = random_similarities(segments, images=3, regions=10, seed=2, spread=2.0).to(dtype).float() + shift
    q.requires_grad_()
    score = nla_t1(q, segments, tau, empty_set=empty_set) + nla_t2(q, segments, tau, 0.75, empty_set=empty_set)
    (gradient,) = torch.autograd.grad(score.sum(), q)
    assert score.isfinite().all()
    assert gradient.isfinite().all()


@EMPTY
@pytest.mark.parametrize("aggregator", ["t1", "t2"])
def test_gradients_pass_gradcheck_in_float64(aggregator, empty_set):
    segments = random_segments(3, 3, most=3)
    q = random_similarities(segments, images=2, regions=3, seed=3).requires_grad_()

    def score(q):
        if aggregator == "t1":
            return nla_t1(q, segments, 0.3, empty_set=empty_set)
        return nla_t2(q, segments, 0.3, 0.75, empty_set=empty_set)

    assert torch.autograd.gradcheck(score, q)


def test_without_the_empty_set_a_hopeless_phrase_still_pulls_one_region():
    segments = random_segments(1, 0, most=1)
    q = torch.tensor([[[-0.9, -0.3, -0.7]]], requires_grad=True)
    (with_empty,) = torch.autograd.grad(nla_t1(q, segments, 0.001).sum(), q)
    (without,) = torch.autograd.grad(nla_t1(q, segments, 0.001, empty_set=False).sum(), q)
    assert with_empty.abs().max() == 0
    torch.testing.assert_close(without, torch.tensor([[[0.0, 1.0, 0.0]]]))
