"""The gradient of all exact scores in Triton, by sums and by cosine, against autograd through enumeration."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_examples import DEVICE, INSTANCES, assert_scores, gradients, instance, reference

from powerclip.alignment import AlignmentConfig
from powerclip.alignment.kernels import exact_all_grad as module
from powerclip.alignment.kernels.best_sets import best_sets
from powerclip.alignment.kernels.exact_all import exact_all
from powerclip.alignment.kernels.exact_all_grad import exact_all_with_gradient
from powerclip.alignment.matmul import similarities
from powerclip.alignment.regions import inverse_set_lengths
from powerclip.alignment.score import differentiates_all, score_all

pytestmark = pytest.mark.kernels
EXACT = {"aggregation": "exact"}
COSINE = {"aggregation": "exact", "similarity": "cosine"}
CONFIGS = {
    "default": AlignmentConfig(**EXACT),
    "any set": AlignmentConfig(**EXACT, largest_set=0),
    "paper": AlignmentConfig.named("paper", **EXACT),
    "no R2T": AlignmentConfig(**EXACT, r2t=False, largest_set=0),
    "no T2R": AlignmentConfig(**EXACT, t2r=False),
    "best region, empty set": AlignmentConfig.named("paper", **EXACT, largest_set=1),
    "cosine": AlignmentConfig(**COSINE, largest_set=0),
    "cosine, sets of two, empty set": AlignmentConfig(**COSINE, largest_set=2, empty_set=True),
    "cosine, no R2T": AlignmentConfig(**COSINE, largest_set=0, r2t=False),
    "cosine, no T2R": AlignmentConfig(**COSINE, t2r=False),
}
# The interpreter runs a node at a time: every setting on one instance, every kind of instance in one or two settings.
CASES = [("few", config) for config in CONFIGS]
CASES += [("ragged, few", "any set"), ("one region", "cosine"), ("huge", "default")]


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    """In the interpreter: few sets in registers at a time. It runs fewer lines, and small instances need several."""
    if not torch.cuda.is_available():
        for name in ("exact_all", "best_sets", "exact_all_grad"):
            monkeypatch.setattr(f"powerclip.alignment.kernels.{name}.LOW_REGIONS", 2)


def example(name: str, config: AlignmentConfig):
    one = instance([1, 3, 1], 5, 5, width=24) if name == "few" else INSTANCES[name]()
    if config.similarity == "cosine":
        one.nodes = F.normalize(one.nodes, dim=-1)
    return one


def plain(one, config):
    return gradients(score_all, one, replace(config, backend="reference"), torch.float64)


@pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter: sets that do not count
@pytest.mark.parametrize(("name", "config"), CASES)
def test_values_and_gradients_equal_enumeration(name, config):
    one = example(name, CONFIGS[config])
    found = gradients(exact_all_with_gradient, one, CONFIGS[config], torch.float32)
    for ours, expected in zip(found, plain(one, CONFIGS[config]), strict=True):
        assert_scores(ours, expected, 1e-5)


def test_the_first_of_tied_nodes_wins():
    one = instance([3], 2, 3)
    one.nodes = one.nodes[:1].expand(3, -1)
    _, of_regions, of_nodes = gradients(exact_all_with_gradient, one, CONFIGS["no T2R"], torch.float32)
    assert_scores(of_regions, plain(one, CONFIGS["no T2R"])[1])
    assert of_nodes[0].abs().min() > 0
    assert (of_nodes[1:] == 0).all()


@pytest.mark.parametrize("config", ["default", "cosine"])
def test_chunks_of_captions_and_slabs_of_lengths_give_the_same(monkeypatch, config):
    one = example("few", CONFIGS[config])
    whole = gradients(exact_all_with_gradient, one, CONFIGS[config], torch.float32)
    monkeypatch.setattr(module, "SLAB", 2)
    monkeypatch.setattr(module, "WINNER_BYTES", 1)  # a slab a chunk
    for ours, expected in zip(
        gradients(exact_all_with_gradient, one, CONFIGS[config], torch.float32), whole, strict=True
    ):
        assert_scores(ours, expected.double(), 1e-6)


@pytest.mark.parametrize("config", ["default", "cosine"])
def test_pairs_without_weight_change_nothing(config):
    """Those of a whole caption are passed over: their winners are never written, and what lies there is not read."""
    one = example("few", CONFIGS[config])

    def some(score):
        def weighted(*arguments):
            return score(*arguments) * torch.tensor([1.0, 0.0, 1.0], device=DEVICE)

        return weighted

    ours = gradients(some(exact_all_with_gradient), one, CONFIGS[config], torch.float32)
    expected = gradients(some(score_all), one, replace(CONFIGS[config], backend="reference"), torch.float64)
    assert (ours[2][1:4] == 0).all()
    for found, exact in zip(ours, expected, strict=True):
        assert_scores(found, exact, 1e-5)


@pytest.mark.parametrize("config", ["default", "cosine"])
def test_two_runs_give_the_same_bits(config):
    one = example("few", CONFIGS[config])
    runs = [gradients(exact_all_with_gradient, one, CONFIGS[config], torch.float32) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_tiny_gradients_do_not_vanish():
    one = instance([2], 3, 2)
    _, *whole = gradients(exact_all_with_gradient, one, CONFIGS["cosine"], torch.float32)
    _, *small = gradients(lambda *a: 1e-20 * exact_all_with_gradient(*a), one, CONFIGS["cosine"], torch.float32)
    for gradient, expected in zip(small, whole, strict=True):
        torch.testing.assert_close(1e20 * gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_best_set_is_named():
    one = example("few", CONFIGS["cosine"])
    q, inverse = similarities(one.regions, one.nodes), inverse_set_lengths(one.regions).T.contiguous()
    best, numbers = best_sets(q, inverse, one.segments, CONFIGS["cosine"])
    members = (numbers.unsqueeze(1) >> torch.arange(5, device=DEVICE).view(1, -1, 1)) & 1  # [T, M, B]
    sets = torch.einsum("tmb,bmd->tbd", members.double(), one.regions.double())
    cosines = F.cosine_similarity(sets, one.nodes.double().unsqueeze(1), dim=-1)
    assert_scores(best, cosines, 1e-6)


def test_more_sets_than_fit_registers_at_once_are_scored_by_cosine():
    config = CONFIGS["cosine, no T2R"]
    one = instance([2], 1, 8)
    assert_scores(exact_all(one.regions, one.nodes, one.segments, config), reference(one, config))


def test_captions_with_more_nodes_than_a_byte_counts_are_differentiated_by_the_formulas(monkeypatch):
    one, config = instance([3, 2], 2, 3), AlignmentConfig(**EXACT, backend="triton")
    expected = plain(one, config)
    monkeypatch.setattr(module, "MOST_NODES", 2)
    monkeypatch.setattr(module, "exact_all_with_gradient", None)
    for ours, exact in zip(gradients(score_all, one, config, torch.float32), expected, strict=True):
        assert_scores(ours, exact, 1e-5)


def test_by_cosine_all_pairs_are_differentiated_where_some_are_selected():
    one = instance([3, 2], 2, 3)
    cosine, sums = (AlignmentConfig(**settings, backend="triton") for settings in (COSINE, EXACT))
    assert differentiates_all(one.regions, one.nodes, cosine, 1)
    assert not differentiates_all(one.regions, one.nodes, sums, 1)
